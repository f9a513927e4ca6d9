"""An engine that crashes and is replaced, by its owner and for those who have joined it; and one that hangs."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.client.fake_engine import FakeEngine, config
from tests.client.test_launch import has_ended, mode, pid_of
from tests.tiers import slow_after
from tokserve.base.errors import EngineDead, StartError
from tokserve.client import engine_client
from tokserve.client.async_llm import AsyncLLM, collect
from tokserve.client.inputs import GenerateRequest
from tokserve.client.launch import EngineProcess
from tokserve.config import Config, LoraConfig
from tokserve.protocol.messages import Announce, EndAnnouncement, Reply, Submit
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.prompt import TokenPrompt, pack_ids

__all__ = ["mode"]

PLAIN = SamplingParams()


def make(restarts: int, **runtime: Any) -> AsyncLLM:
    return AsyncLLM.from_config(config(tokens_only=True, runtime={"restart_engine": restarts, **runtime}))


def request(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt=TokenPrompt(pack_ids([5])), task=PLAIN)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_killed_engine_is_replaced_and_its_requests_may_be_sent_again(mode: Any) -> None:
    mode("hang")

    async def scene() -> None:
        llm = make(1)
        replaced: list[int] = []
        llm.on_replaced(lambda: replaced.append(pid_of(llm)))
        await llm.start()
        first = pid_of(llm)
        waiting = asyncio.create_task(collect(llm.stream([1], PLAIN, request_id="r")))
        asking = asyncio.create_task(llm.call("silence"))
        await asyncio.sleep(0)
        mode("serve")
        os.kill(first, signal.SIGKILL)
        for task in (waiting, asking):
            with pytest.raises(EngineDead) as caught:
                await asyncio.wait_for(task, 120)
            assert caught.value.code == "engine_restarting" and caught.value.retry_after
            assert "SIGKILL" in caught.value.private and "SIGKILL" not in caught.value.message
        assert llm.dead is None and llm.down is not None and llm.num_inflight == 0 and not llm.hung
        with pytest.raises(EngineDead) as caught:
            llm.stream([1], PLAIN)
        assert caught.value.code == "engine_restarting" and caught.value is not llm.down
        await llm.restored()
        assert llm.down is None and replaced == [pid_of(llm)] and pid_of(llm) != first
        assert (await collect(llm.stream([1, 2], PLAIN, request_id="r")))[0].token_ids == [1, 2]
        os.kill(pid_of(llm), signal.SIGKILL)  # one restart was allowed
        await until(lambda: llm.dead is not None)
        with pytest.raises(EngineDead) as caught:
            llm.stream([1], PLAIN)
        assert caught.value.code == "engine_dead" and caught.value.retry_after is None
        await llm.shutdown()
        assert has_ended(pid_of(llm))

    asyncio.run(scene())


@pytest.mark.slow
def test_the_next_engine_loads_no_adapters_at_its_start(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes them over: a directory that has gone meanwhile must not end its start."""
    mode("serve")
    start, modules = engine_client.start_engine, []

    def recorded(config: Config, *args: Any) -> Any:
        modules.append(config.lora.lora_modules)
        return start(config, *args)

    monkeypatch.setattr(engine_client, "start_engine", recorded)

    async def scene() -> None:
        lora = LoraConfig(enable_lora=True, lora_modules=["a=/a"])
        base = config(tokens_only=True, runtime={"restart_engine": 1})
        llm = AsyncLLM.from_config(msgspec.structs.replace(base, lora=lora))
        await llm.start()
        os.kill(pid_of(llm), signal.SIGKILL)
        await until(lambda: llm.down is not None)
        await llm.restored()
        assert modules == [["a=/a"], None]
        await llm.shutdown()

    asyncio.run(scene())


@pytest.mark.slow
def test_restarts_are_counted_within_a_time(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode("serve")
    monkeypatch.setattr(engine_client, "RESTART_WINDOW", 0.0)

    async def scene() -> None:
        llm = make(1)
        await llm.start()
        for _ in range(2):
            before = pid_of(llm)
            os.kill(before, signal.SIGKILL)
            await until(lambda before=before: pid_of(llm) != before and llm.down is None)  # type: ignore[misc]
        assert (await collect(llm.stream([3], PLAIN)))[0].token_ids == [3]
        await llm.shutdown()

    asyncio.run(scene())


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(["exit", "refuse", "crash"], 1))
def test_an_engine_that_cannot_be_replaced_is_dead_in_the_end(
    mode: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode("serve")
    monkeypatch.setattr(engine_client, "RETRY", (0.01, 0.01))

    async def scene() -> None:
        llm = make(2)
        notified = asyncio.Event()
        llm.on_replaced(notified.set)
        await llm.start()
        mode(name)
        os.kill(pid_of(llm), signal.SIGKILL)
        await asyncio.wait_for(notified.wait(), 60)
        assert llm.dead is not None and llm.dead.code == "engine_dead"
        await llm.restored()  # does not wait
        await llm.shutdown()

    asyncio.run(scene())


@pytest.mark.parametrize("step", slow_after(["stop", "start"], 1))
def test_an_unforeseen_error_of_a_restart_ends_the_waiting(
    mode: Any, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mode("serve")

    async def scene() -> None:
        llm = make(3)
        notified = asyncio.Event()
        llm.on_replaced(notified.set)
        await llm.start()
        engine = llm._engine.engine

        async def cluster_is_gone(patience: float) -> int:
            raise ConnectionError("the cluster is gone")

        def no_such_program() -> Any:
            raise ValueError("the cluster is gone")

        if step == "stop":
            monkeypatch.setattr(engine, "stop", cluster_is_gone)
        else:
            monkeypatch.setattr(llm._engine, "_process", no_such_program)
        os.kill(pid_of(llm), signal.SIGKILL)
        await asyncio.wait_for(notified.wait(), 30)
        assert llm.dead is not None and "the cluster is gone" in llm.dead.private
        await llm.restored()  # does not wait
        monkeypatch.undo()
        await llm.shutdown()

    asyncio.run(scene())
    assert "Traceback" in caplog.text


@pytest.mark.slow
def test_a_failed_restart_is_tried_again(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode("serve")
    monkeypatch.setattr(engine_client, "RETRY", (0.01, 0.02))

    async def scene() -> None:
        llm = make(3)
        await llm.start()
        start, failed = llm._engine._process, []

        def lacking() -> Any:
            if len(failed) < 2:
                failed.append("No space left on device")
                raise StartError(failed[-1])
            return start()

        monkeypatch.setattr(llm._engine, "_process", lacking)
        os.kill(pid_of(llm), signal.SIGKILL)
        await until(lambda: llm.down is not None)
        await llm.restored()
        assert len(failed) == 2 and llm.dead is None and llm.down is None
        assert (await collect(llm.stream([1, 2], PLAIN)))[0].token_ids == [1, 2]
        await llm.shutdown()

    asyncio.run(scene())


def test_shutdown_while_another_engine_starts_leaves_nothing(mode: Any) -> None:
    mode("serve")

    async def scene() -> None:
        llm = make(3)
        await llm.start()
        first = pid_of(llm)
        mode("mute")
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of(llm) != first)
        await llm.shutdown()
        assert has_ended(pid_of(llm)) and has_ended(first) and llm.dead is None

    asyncio.run(scene())


def test_shutdown_at_the_moment_at_which_another_engine_has_a_place(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's `asyncio.wait_for` swallows a cancellation in the turn in which its result comes."""
    mode("serve")

    async def scene() -> None:
        llm = make(3)
        await llm.start()
        first = pid_of(llm)
        located, shutdowns = EngineProcess.located, []

        async def located_at_shutdown(engine: EngineProcess) -> str:
            shutdowns.append(asyncio.ensure_future(llm.shutdown()))
            return await located(engine)

        monkeypatch.setattr(EngineProcess, "located", located_at_shutdown)
        mode("mute")
        os.kill(first, signal.SIGKILL)
        await until(lambda: bool(shutdowns))
        await shutdowns[0]
        assert len(shutdowns) == 1 and llm.dead is None
        assert has_ended(pid_of(llm)) and has_ended(first)

    asyncio.run(scene())


@pytest.mark.slow
def test_joined_clients_are_sent_the_next_engine(mode: Any) -> None:
    mode("serve")

    async def scene() -> None:
        llm, other = make(1), make(1)

        def tell() -> None:
            if llm.dead:
                other.give_up()
            else:
                other.rejoin(*llm.engine)

        llm.on_replaced(tell)
        await llm.start()
        address, pid = llm.engine
        await other.connect(address, pid=pid, name="api-0")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: llm.down is None and pid_of(llm) != pid)
        await other.restored()
        assert (await collect(other.stream([8], PLAIN)))[0].token_ids == [8]
        os.kill(pid_of(llm), signal.SIGKILL)
        await until(lambda: other.dead is not None)
        with pytest.raises(EngineDead) as caught:
            other.stream([1], PLAIN)
        assert caught.value.code == "engine_dead"
        await other.shutdown()
        await llm.shutdown()

    asyncio.run(scene())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "cannot be watched: Too many open files"),
        pytest.param(ZeroDivisionError(), "ZeroDivisionError", marks=pytest.mark.slow),
    ],
    ids=["descriptors", "unforeseen"],
)
def test_a_client_that_cannot_join_the_next_engine_stops_waiting(
    mode: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """The owner of the engine replaces it."""
    mode("serve")

    def failing(pid: int, then: Callable[[], object]) -> None:
        raise error

    async def scene() -> None:
        first, second, other = make(0), make(0), make(1)
        await first.start()
        await second.start()
        await other.connect(first.engine[0], pid=first.engine[1], name="api-0")
        monkeypatch.setattr(engine_client, "watch", failing)
        other.rejoin(*second.engine)
        await asyncio.wait_for(other.restored(), 30)
        assert other.dead is not None and other.dead.code == "engine_dead"
        assert reason in other.dead.private
        with pytest.raises(EngineDead):
            other.stream([1], PLAIN)
        other.rejoin(*second.engine)  # too late
        assert other.dead is not None
        for llm in (other, first, second):
            await llm.shutdown()

    asyncio.run(scene())


@pytest.mark.slow
def test_an_engine_is_watched_while_it_is_joined(mode: Any) -> None:
    mode("serve")

    def watched() -> int:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum("pidfd" in link for link in links)

    async def scene() -> None:
        first, second, other = make(0), make(0), make(1)
        await first.start()
        await second.start()
        before = watched()
        await other.connect(first.engine[0], pid=first.engine[1], name="api-0")
        assert watched() == before + 1
        other.rejoin(*second.engine)
        await asyncio.wait_for(other.restored(), 30)
        assert watched() == before + 1
        await other.shutdown()
        assert watched() == before
        for llm in (first, second):
            await llm.shutdown()

    asyncio.run(scene())


def test_a_new_engine_gets_the_announcements(tmp_path: Path) -> None:
    async def scene() -> None:
        with FakeEngine(f"ipc://{tmp_path}/a") as first, FakeEngine(f"ipc://{tmp_path}/b") as second:
            llm = make(1)
            await llm.connect(first.address)
            ended, left = llm.announce("cmpl-gone", "g"), llm.announce("cmpl-left", "g")
            ended.end()
            first.wait(EndAnnouncement)
            llm.rejoin(second.address, os.getpid())
            await asyncio.wait_for(llm.restored(), 30)
            [state] = [llm.prepare(request("left"))]
            stream = llm.submit([state], announcement=left)[0]
            await stream.accepted()
            [announce], [submit] = second.wait(Announce), second.wait(Submit)
            assert announce == Announce(submit.announced, "left", "g")
            await llm.shutdown()

    asyncio.run(scene())


@pytest.mark.slow
def test_an_announced_engine_that_has_ended_is_skipped(mode: Any) -> None:
    mode("serve")

    async def scene() -> None:
        first, second, third, other = make(0), make(0), make(0), make(1)
        await first.start()
        await second.start()
        await third.start()
        await other.connect(first.engine[0], pid=first.engine[1], name="api-0")
        ended = second.engine
        await second.shutdown()
        other.rejoin(*ended)
        joining = other._engine._restarting
        assert joining is not None
        await asyncio.wait([joining], timeout=120)
        assert joining.done() and other.dead is None
        assert other.down is not None and other.down.code == "engine_restarting"
        other.rejoin(*third.engine)
        await asyncio.wait_for(other.restored(), 30)
        assert (await collect(other.stream([8], PLAIN)))[0].token_ids == [8]
        await other.shutdown()
        await first.shutdown()
        await third.shutdown()

    asyncio.run(scene())


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(["heirless", "refuses_heritage"], 1))
def test_an_engine_that_cannot_be_what_the_last_one_was_does_not_serve(mode: Any, name: str) -> None:
    mode("serve")

    async def scene() -> None:
        llm = make(1)
        notified = asyncio.Event()
        llm.on_replaced(notified.set)
        await llm.start()
        mode(name)
        llm._engine._config = config(tokens_only=True, start_timeout=2.0, runtime={"restart_engine": 1})
        os.kill(pid_of(llm), signal.SIGKILL)
        await asyncio.wait_for(notified.wait(), 60)
        assert llm.dead is not None
        await llm.shutdown()

    asyncio.run(scene())


def test_a_hung_engine_is_killed_and_replaced(mode: Any) -> None:
    mode("deaf")

    async def scene() -> None:
        llm = make(1, step_timeout=0.2)
        await llm.start()
        first = pid_of(llm)
        mode("serve")
        waiting = asyncio.create_task(collect(llm.stream([1], PLAIN, request_id="r")))
        with pytest.raises(EngineDead) as caught:
            await asyncio.wait_for(waiting, 120)
        assert caught.value.code == "engine_restarting" and caught.value.retry_after
        assert "had not finished a step" in caught.value.private
        await llm.restored()
        assert has_ended(first) and pid_of(llm) != first and llm.dead is None
        assert (await collect(llm.stream([1, 2], PLAIN, request_id="r")))[0].token_ids == [1, 2]
        await llm.shutdown()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_hung_engine_that_nothing_may_replace_is_left_alone(mode: Any) -> None:
    mode("deaf")

    async def scene() -> None:
        llm = make(1, step_timeout=0.2)
        await llm.start()
        first = pid_of(llm)
        await until(lambda: pid_of(llm) != first and llm.hung)  # it hangs as the first did, and one restart was allowed
        second = pid_of(llm)
        for _ in range(5):
            llm._engine._heartbeat._beat()
        assert llm.hung and llm.dead is None and llm.down is None and pid_of(llm) == second and not has_ended(second)
        await llm.shutdown()

    asyncio.run(scene())


def test_an_engine_that_does_not_answer_hangs_until_it_does(tmp_path: Path) -> None:
    async def scene() -> None:
        llm = make(0, step_timeout=0.2)
        with FakeEngine(f"ipc://{tmp_path}/e.sock") as engine:
            engine.deaf = True
            await llm.connect(f"ipc://{tmp_path}/e.sock")
            await until(lambda: llm.hung)
            assert llm.silence > 0.2 and llm.dead is None and llm.down is None
            engine.deaf = False
            engine.send(Reply(engine_client.PING, {}))
            await until(lambda: not llm.hung)
            await llm.shutdown()

    asyncio.run(scene())


def test_an_engine_that_cannot_be_watched_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(pid: int, then: Callable[[], object]) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scene() -> None:
        llm = make(0)
        with FakeEngine(f"ipc://{tmp_path}/e.sock"), pytest.raises(StartError, match="cannot be watched"):
            await llm.connect(f"ipc://{tmp_path}/e.sock", pid=os.getpid())

    monkeypatch.setattr(engine_client, "watch", exhausted)
    asyncio.run(scene())
