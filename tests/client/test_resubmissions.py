"""An id that a request of another front end has in the engine, and whose client may have left it (rl-faults E5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.client.fake_engine import FakeEngine, config, echo
from tokserve.base.errors import Conflict
from tokserve.client import resubmissions
from tokserve.client.async_llm import AsyncLLM, collect
from tokserve.protocol.messages import Announce, EndAnnouncement, Submit, SubmitReply
from tokserve.protocol.params import SamplingParams

PLAIN = SamplingParams()
Scene = Callable[[AsyncLLM, FakeEngine], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plays a scene with a client of this name; an id is waited for so long."""

    def run(scene: Scene, seconds: float, name: str | None = "api-0") -> None:
        monkeypatch.setattr(resubmissions, "LEAVING_SECONDS", seconds)

        async def session() -> None:
            with FakeEngine(f"ipc://{tmp_path}/e.sock", script=echo) as engine:
                llm = AsyncLLM.from_config(config(tokens_only=True))
                await llm.connect(engine.address, name=name)
                await scene(llm, engine)
                assert llm._engine.requests.idle and not llm._engine.request_ids()
                await llm.shutdown()

        asyncio.run(session())

    return run


def refusing(count: int) -> Callable[[Submit], SubmitReply]:
    """An admission that says of the first submissions that their id is in use."""
    remaining = [count]

    def admission(submit: Submit) -> SubmitReply:
        remaining[0] -= 1
        return SubmitReply(submit.call_id, "duplicate_id" if remaining[0] >= 0 else "", "in use")

    return admission


def test_an_id_is_waited_for_and_aborts_find_the_request_meanwhile(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        engine.admission = refusing(3)
        stream = llm.stream([1, 2], PLAIN, request_id="r", group_id="g")
        assert (await collect(stream))[0].token_ids == [1, 2]
        [announce] = engine.wait(Announce)
        first, *later = engine.wait(Submit, 4)
        assert (announce.request_id, announce.group_id) == ("r", "g") and first.announced == 0
        assert [submit.announced for submit in later] == [announce.number] * 3
        assert {submit.call_id for submit in later} == {first.call_id}
        assert [message.number for message in engine.wait(EndAnnouncement)] == [announce.number]

    play(scene, 600.0)


def test_an_id_that_stays_in_use_is_a_conflict(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        engine.admission = refusing(1 << 30)
        with pytest.raises(Conflict) as caught:
            await llm.stream([1], PLAIN, request_id="r").accepted()
        assert caught.value.code == "duplicate_id"
        engine.wait(EndAnnouncement)

    play(scene, 0.1)


def test_the_only_front_end_knows_its_ids(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        engine.admission = refusing(1)
        with pytest.raises(Conflict):
            await llm.stream([1], PLAIN, request_id="r").accepted()
        assert len(engine.wait(Submit)) == 1

    play(scene, 600.0, None)


def test_a_request_that_is_given_up_is_not_sent_again(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        engine.admission = refusing(1 << 30)
        stream = llm.stream([1], PLAIN, request_id="r")
        await asyncio.to_thread(engine.wait, Announce)
        await stream.aclose()
        await asyncio.to_thread(engine.wait, EndAnnouncement)
        engine.admission = refusing(0)
        assert (await collect(llm.stream([3], PLAIN, request_id="r")))[0].token_ids == [3]

    play(scene, 600.0)


def test_an_engine_that_is_lost_ends_the_waiting(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        engine.admission = refusing(1 << 30)
        accepted = asyncio.ensure_future(llm.stream([1], PLAIN, request_id="r").accepted())
        await asyncio.to_thread(engine.wait, Announce)
        await llm.shutdown()
        with pytest.raises(Exception, match="shut down"):
            await accepted

    play(scene, 600.0)
