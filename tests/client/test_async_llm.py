"""`AsyncLLM` against a fake engine: its start, commands, aborts, `generate`, and the engine's death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.fake_engine import FakeEngine, config, echo, logprobs_for, stop, tokens
from tests.client.scenes import settled, waited
from tests.waiting import until
from tokserve.base.errors import EngineDead, RequestError, RequestFailed, StartError
from tokserve.client import requests
from tokserve.client.async_llm import AsyncLLM, collect
from tokserve.protocol.messages import Abort, Call, Dead, EngineRequest, Finish, StepStats
from tokserve.protocol.params import RequestOptions, SamplingParams
from tokserve.protocol.prompt import pack_ids, unpack_ids
from tokserve.text.tokenizer import Tokenizer

PLAIN = SamplingParams()


def test_abort_of_what_was_sent_from_here(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        streams = [llm.stream([1], SamplingParams(n=2), request_id=name) for name in ("a", "b#c")]
        assert await llm.abort_own("shutdown") == {"a": "aborted", "b#c": "aborted"}
        assert {c.stop_detail for stream in streams for c in await collect(stream)} == {"shutdown"}
        assert await llm.abort_own() == {}

    play(scene)


def test_statistics_on_demand(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        await llm.refresh(5)
        assert llm.stats == StepStats(steps=77)
        await llm.refresh(0)  # without a reply in time, the last values are returned
        engine.send(Dead("why"))
        with pytest.raises(EngineDead):
            await llm.call("silence")
        await llm.refresh(5)
        assert llm.stats == StepStats()  # a lost engine has no state

    play(scene)


def test_abort_returns_a_result_for_each_id(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        one = llm.stream([1], PLAIN, request_id="generate-tokens-one", stream=False)
        two = llm.stream([1], SamplingParams(n=2), request_id="two")
        done = llm.stream([1], PLAIN, request_id="done")
        await waited(engine, EngineRequest, 4)
        engine.step(tokens("two#0", [5]), tokens("two#1", [6], stop()), tokens("done#0", [7], stop()))
        await collect(done)
        results = await llm.abort(["one", "chatcmpl-two", "done", "cmpl-nobody", "two"], "abort_user")
        assert results == {
            "one": "aborted",
            "chatcmpl-two": "aborted",
            "two": "aborted",
            "done": "finished",
            "cmpl-nobody": "not_found",
        }
        requested = [call for call in engine.wait(Call) if call.method == "abort"]
        assert [call.args["keys"] for call in requested] == [["one", "two", "done", "nobody", "two"]]
        [first] = await collect(one)
        assert (first.finish_reason, first.stop_detail) == ("abort", "abort_user")
        assert [c.token_ids for c in await collect(two)] == [[5], [6]]
        assert await llm.abort([]) == {}

    play(scene)


def test_abort_takes_one_id_as_well(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], PLAIN, request_id="one")
        assert await llm.abort("generate-tokens-one") == {"generate-tokens-one": "aborted"}
        await collect(stream)

    play(scene)


def test_generate_is_a_growing_output(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("so far", False)
        outputs = llm.generate({"prompt_token_ids": [7, 8], "cache_salt": "s"}, SamplingParams(n=2, logprobs=1), "r")
        first = asyncio.ensure_future(anext(outputs))
        all_sent = await waited(engine, EngineRequest, 2)
        assert [sent.request_id for sent in all_sent] == ["r#0", "r#1"]
        engine.step(tokens("r#0", ids, logprobs=logprobs_for(ids), cached=2))
        one = await first
        assert (one.request_id, one.prompt, one.prompt_token_ids, one.finished) == ("r", None, [7, 8], False)
        assert [(c.index, c.token_ids, c.text, c.finish_reason) for c in one.outputs] == [(0, ids, "so far", None)]
        assert one.num_cached_tokens == 2
        engine.step(tokens("r#1", [5], stop("max_tokens", "length"), logprobs=logprobs_for([5])))
        two = await anext(outputs)
        assert [len(c.token_ids) for c in two.outputs] == [len(ids), 1] and not two.finished
        assert two.num_cached_tokens == 0  # the other choice has computed the prompt
        engine.step(tokens("r#0", [2], stop("eos", "stop"), logprobs=logprobs_for([2]), spans=[("v", 0, 3)]))
        last = await anext(outputs)
        choice = last.outputs[0]
        assert last.finished and choice.token_ids == [*ids, 2] and choice.weight_versions == [("v", 0, 3)]
        assert choice.logprobs is not None
        logprobs = [choice.logprobs[i][token].logprob for i, token in enumerate(choice.token_ids)]
        assert logprobs == pytest.approx([-token / 10 for token in choice.token_ids])
        assert [output async for output in outputs] == []

    play(scene)


def test_leaving_generate_aborts(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        outputs = llm.generate([1], PLAIN, "left")
        requested = asyncio.ensure_future(anext(outputs))
        await waited(engine, EngineRequest)
        engine.step(tokens("left#0", [5]))
        await requested
        await outputs.aclose()
        [abort] = await waited(engine, Abort)
        assert abort.request_ids == ["left#0"]
        with pytest.raises(RequestError, match="'ids'"):
            await anext(llm.generate({"ids": [1]}, PLAIN))

    play(scene)


def test_before_the_start_the_error_has_instructions(model: Path) -> None:
    with pytest.raises(EngineDead, match="await start"):
        AsyncLLM.from_config(config(model)).stream([1], PLAIN)


def test_abort_group(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        body: dict[str, Any] = {}

        async def call(method: str, /, **args: Any) -> dict[str, str]:
            body[method] = args
            return {"a": "aborted"}

        llm.call = call  # type: ignore[method-assign]
        assert await llm.abort_group("g", "shutdown") == {"a": "aborted"}
        assert body == {"abort_group": {"group": "g", "reason": "shutdown"}}

    play(scene)


def test_abort_all(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        streams = [llm.stream([1], PLAIN, request_id=name) for name in ("a", "b#c")]
        assert await llm.abort_all("shutdown") == {"a": "aborted", "b#c": "aborted"}
        for stream in streams:
            assert (await collect(stream))[0].stop_detail == "shutdown"

    play(scene)


def test_call(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        assert await llm.call("ping") == {}
        with pytest.raises(RequestFailed, match="no verb 'dance'"):
            await llm.call("dance", fast=True)
        assert engine.wait(Call, 3)[-1].args == {"fast": True}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.call("silence"), 0.02)
        assert await llm.call("ping") == {}

    play(scene)


@pytest.mark.parametrize("value", [10**30, "\ud800", object()], ids=["integer", "surrogate", "object"])
def test_a_call_with_what_no_message_holds(play: Callable[..., None], value: Any) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        with pytest.raises(RequestError, match="sleep: "):
            await llm.sleep(level=value)
        assert await llm.call("ping") == {}

    play(scene)


@pytest.mark.parametrize(
    "terms", [{"cache_salt": "\ud800"}, {"group_id": "\ud800"}, {"request_id": "\ud800"}, {"lora_request": "\ud800"}]
)
def test_a_request_with_what_no_message_holds_leaves_no_trace(play: Callable[..., None], terms: dict[str, Any]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        with pytest.raises(RequestError, match="cannot be sent: "):
            llm.stream([1], PLAIN, **terms)
        assert llm.num_inflight == 0
        assert await llm.call("ping") == {}

    play(scene)


def test_the_engines_death_reaches_all_waiting_callers(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        waiting = [llm.stream([1], PLAIN, request_id=f"{i}") for i in range(3)]
        tasks = [asyncio.create_task(collect(stream)) for stream in waiting[:2]]
        call = asyncio.create_task(llm.call("silence"))
        engine.admission = lambda submit: None
        unanswered = llm.stream([1], PLAIN)
        accepting = asyncio.create_task(unanswered.accepted())
        engine.step(tokens("2#0", [5]))
        await settled(llm)
        engine.send(Dead("step 7: secrets of the machine"))
        for task in (*tasks, call, accepting):
            with pytest.raises(EngineDead) as caught:
                await task
            assert "secrets" not in caught.value.message and caught.value.code == "engine_dead"
            assert caught.value.private == "step 7: secrets of the machine" and caught.value.status == 503
        assert (await anext(waiting[2])).token_ids == [5], "what had come is not lost"
        with pytest.raises(EngineDead):
            await anext(waiting[2])
        assert llm.dead is not None and llm.num_inflight == 0
        with pytest.raises(EngineDead):
            llm.stream([1], PLAIN)
        with pytest.raises(EngineDead):
            await llm.abort(["x"])
        with pytest.raises(EngineDead):
            await llm.call("ping")
        for stream in waiting:
            stream.close()

    play(scene)


def test_the_engines_refusal_ends_the_request_only(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], PLAIN, request_id="r", text=True)
        engine.step(tokens("r#0", [], Finish("error", "nan", message="the logits were not finite")))
        [done] = await collect(stream)
        assert (done.finish_reason, done.stop_detail, done.message) == ("error", "nan", "the logits were not finite")
        assert done.times == (0.0, 0.0, 0.0) and done.text == "" and llm.dead is None

    play(scene)


def test_refused_requests_send_nothing(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        for bad in (SamplingParams(temperature=-1.0), SamplingParams(stop_token_ids=[999])):
            with pytest.raises(RequestError):
                llm.stream([1], bad, request_id="r")
        with pytest.raises(RequestError):
            llm.stream([], PLAIN, request_id="r")
        await settled(llm)
        assert not [m for m in engine.received if isinstance(m, EngineRequest)] and llm.num_inflight == 0

    play(scene)


def test_options_reach_the_engine(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        packed = pack_ids([3, 4])
        params = SamplingParams(temperature=1e-9, max_tokens=7)
        stream = llm.stream(packed, params, priority=-2, cache_salt="s", deadline_ms=5, queue_timeout_ms=6)
        assert stream.prompt_ids == [3, 4]
        [sent] = await waited(engine, EngineRequest)
        assert sent.options == RequestOptions(
            stream=True, priority=-2, cache_salt="s", deadline_ms=5, queue_timeout_ms=6
        )
        assert unpack_ids(sent.prompt.ids) == [3, 4]
        assert sent.task.temperature == 1e-9 and sent.task.max_tokens == 7

    play(scene)


def test_many_streams_at_once(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        prompts = [[(i * 7 + j) % 100 for j in range(40)] for i in range(60)]
        results = await asyncio.gather(*[collect(llm.stream(prompt, PLAIN)) for prompt in prompts])
        assert [result[0].token_ids for result in results] == prompts
        assert llm.num_inflight == 0

    play(scene, echo)


def test_the_loop_gets_its_turn_among_consumers_that_take_long(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "TURN", 0.0)

    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        turns, calls = [0], list[int]()

        def turn() -> None:
            turns[0] += 1
            asyncio.get_running_loop().call_soon(turn)

        streams = [llm.stream([5], PLAIN, request_id=f"r{i}") for i in range(8)]
        for stream in streams:
            stream.listen(lambda: (calls.append(turns[0]), time.sleep(0.001)))
        await waited(engine, EngineRequest, 8)
        asyncio.get_running_loop().call_soon(turn)
        engine.step(*[tokens(f"r{i}#0", [11], stop()) for i in range(8)])
        while len(calls) < 8:
            await asyncio.sleep(0.001)
        assert len(set(calls)) == 8, calls
        assert all([delta.token_ids for delta in stream.take()] == [[11]] for stream in streams)

    play(scene)


def test_after_shutdown_nothing_starts(play: Callable[..., None]) -> None:
    async def scene(llm: AsyncLLM, engine: FakeEngine) -> None:
        stream = llm.stream([1], PLAIN)
        await llm.shutdown()
        assert (await collect(stream))[0].stop_detail == "shutdown"
        with pytest.raises(EngineDead, match="shut down"):
            llm.stream([1], PLAIN)
        with pytest.raises(EngineDead, match="shut down"):
            await llm.call("ping")
        assert llm.dead is None
        await llm.shutdown()

    play(scene)


def test_before_the_start_nothing_works() -> None:
    llm = AsyncLLM.from_config(config())
    with pytest.raises(EngineDead, match="not started"):
        llm.stream([1], PLAIN)
    with pytest.raises(EngineDead, match="not started"):
        _ = llm.ready


def test_a_missing_tokenizer_stops_the_start(tmp_path: Path) -> None:
    async def scene(**options: Any) -> AsyncLLM:
        with FakeEngine(f"ipc://{tmp_path}/e.sock"):
            llm = AsyncLLM.from_config(config(tmp_path, **options))
            await llm.connect(f"ipc://{tmp_path}/e.sock")
            await llm.shutdown()
            return llm

    with pytest.raises(StartError, match="tokens-only"):
        asyncio.run(scene())
    assert asyncio.run(scene(tokens_only=True)).tokenizer is None


def test_a_death_while_the_tokenizer_loads_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"ipc://{tmp_path}/e.sock"
    with FakeEngine(address) as engine:

        def load(directory: Path) -> None:
            engine.wait(Call)
            engine.send(Dead("too late"))
            until(lambda: llm.dead)

        llm = AsyncLLM.from_config(config(tmp_path))
        monkeypatch.setattr(Tokenizer, "load", load)
        with pytest.raises(StartError, match="too late"):
            asyncio.run(llm.connect(address))
