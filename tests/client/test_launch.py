"""The engine's process: start, refusal, crash, kill; no process or file remains."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.fake_engine import READY, config
from tests.waiting import until
from tokserve.base.curve import make_keys
from tokserve.base.errors import EngineDead, StartError
from tokserve.base.processes import describe_exit
from tokserve.client import engine_client, launch
from tokserve.client.async_llm import AsyncLLM, collect
from tokserve.client.launch import EngineProcess
from tokserve.features.fleet import api_server
from tokserve.protocol.params import SamplingParams

PLAIN = SamplingParams()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short enough for a socket's name wherever pytest keeps its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`mode(name)` decides how the engine processes of this test behave; their directories go to tmp_path."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def choose(name: str) -> None:
        monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-m", "tests.client.fake_process", name))

    yield choose
    assert not list(tmp_path.iterdir()), "a socket directory was left behind"


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pid_of(llm: AsyncLLM) -> int:
    return llm.engine[1]


def test_start_serve_and_shut_down(mode: Any, tmp_path: Path) -> None:
    mode("serve")

    async def scene() -> int:
        llm = AsyncLLM.from_config(config(tokens_only=True))
        await llm.start()
        [directory] = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert llm.ready == READY and llm.dead is None
        assert (await collect(llm.stream([4, 5], PLAIN)))[0].token_ids == [4, 5]
        pid = pid_of(llm)
        await llm.shutdown()
        assert has_ended(pid) and llm._engine.engine.exited.result() == 0
        return pid

    asyncio.run(scene())


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("refuse", r"^the checkpoint has no such tensor$"),
        ("crash", "the engine failed to start: KeyError: 'x'; its log says more"),
        ("exit", "the engine failed to start: the engine process ended with exit code 3"),
        ("mute", r"was not ready within 0.5 s \(start_timeout\)"),
    ],
)
def test_a_failed_start_raises_the_reason(mode: Any, name: str, message: str) -> None:
    mode(name)
    seen: list[AsyncLLM] = []

    async def scene() -> None:
        seen.append(AsyncLLM.from_config(config(tokens_only=True, start_timeout=0.5 if name == "mute" else 20)))
        await seen[0].start()

    with pytest.raises(StartError, match=message):
        asyncio.run(scene())
    assert has_ended(pid_of(seen[0]))


def test_a_cancelled_start_leaves_nothing(mode: Any) -> None:
    mode("mute")

    async def scene() -> None:
        llm = AsyncLLM.from_config(config(tokens_only=True))
        starting = asyncio.create_task(llm.start())
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await llm.shutdown()
        assert has_ended(pid_of(llm))

    asyncio.run(scene())


def test_a_killed_engine_is_noticed(mode: Any) -> None:
    mode("hang")

    async def scene() -> None:
        llm = AsyncLLM.from_config(config(tokens_only=True))
        await llm.start()
        waiting = asyncio.create_task(collect(llm.stream([1], PLAIN)))
        await asyncio.sleep(0)
        os.kill(pid_of(llm), signal.SIGKILL)
        with pytest.raises(EngineDead) as caught:
            await asyncio.wait_for(waiting, 60)
        assert caught.value.private.startswith("the engine process was killed by SIGKILL")
        assert llm.dead is not None and "SIGKILL" not in llm.dead.message
        with pytest.raises(EngineDead):
            llm.stream([1], PLAIN)
        await llm.shutdown()

    asyncio.run(scene())


def test_a_client_that_has_joined_notices_the_end_of_the_engine(mode: Any) -> None:
    mode("hang")

    async def scene() -> None:
        llm, other = (AsyncLLM.from_config(config(tokens_only=True)) for _ in range(2))
        with pytest.raises(EngineDead, match="not started"):
            _ = llm.engine
        await llm.start()
        address, pid = llm.engine
        await other.connect(address, pid=pid, name="api-0")
        waiting = asyncio.create_task(collect(other.stream([1], PLAIN)))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await asyncio.wait_for(waiting, 60)
        assert other.dead is not None and other.dead.private == "the engine process ended"
        await other.shutdown()
        await llm.shutdown()
        with pytest.raises(StartError, match="has ended"):
            await AsyncLLM.from_config(config(tokens_only=True)).connect(address, pid=pid)

    asyncio.run(scene())


def test_requests_in_flight_end_with_what_they_have(mode: Any) -> None:
    mode("hang")

    async def scene() -> None:
        llm = AsyncLLM.from_config(config(tokens_only=True))
        await llm.start()
        waiting = asyncio.create_task(collect(llm.stream([1], PLAIN)))
        await asyncio.sleep(0)
        await llm.shutdown()
        assert (await waiting)[0].stop_detail == "shutdown"

    asyncio.run(scene())


def test_a_stubborn_engine_is_killed(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode("stubborn")
    monkeypatch.setattr(engine_client, "SHUTDOWN_PATIENCE", 0.3)
    monkeypatch.setattr(launch, "TERM_SECONDS", 0.3)

    async def scene() -> None:
        llm = AsyncLLM.from_config(config(tokens_only=True))
        await llm.start()
        await llm.shutdown()
        assert has_ended(pid_of(llm)) and llm._engine.engine.exited.result() == -signal.SIGKILL

    asyncio.run(scene())


def test_the_engine_ends_with_the_event_loop(mode: Any) -> None:
    mode("serve")
    pids: list[int] = []

    async def scene() -> None:
        engine = EngineProcess(config())
        pids.append(engine.pid)

    with pytest.warns(ResourceWarning, match="still running"):
        asyncio.run(scene())
        import gc

        gc.collect()
        until(lambda: not _alive(pids[0]))


def _alive(pid: int) -> bool:
    """The process runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_does_not_reach_the_engine(mode: Any) -> None:
    mode("serve")

    async def scene() -> None:
        llm = AsyncLLM.from_config(config(tokens_only=True))
        await llm.start()
        assert os.getpgid(pid_of(llm)) != os.getpgid(0)
        await llm.shutdown()

    asyncio.run(scene())


def test_it_starts_once(mode: Any) -> None:
    """A second engine would replace the first, and no client would end it."""
    mode("serve")

    async def scene() -> None:
        llm = AsyncLLM.from_config(config(tokens_only=True))
        await llm.start()
        first = pid_of(llm)
        with pytest.raises(StartError, match="started only once"):
            await llm.start()
        assert pid_of(llm) == first and llm.dead is None
        await llm.shutdown()
        with pytest.raises(StartError, match="started only once"):
            await llm.start()

    asyncio.run(scene())


def test_a_command_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "COMMAND", ("/no/such/python",))

    async def scene() -> None:
        await AsyncLLM.from_config(config(tokens_only=True)).start()

    with pytest.raises(StartError, match="could not be started"):
        asyncio.run(scene())
    import gc

    gc.collect()
    assert not list(tmp_path.iterdir())


def test_exit_codes_in_words() -> None:
    assert describe_exit(1) == "ended with exit code 1"
    assert describe_exit(-9).startswith("was killed by SIGKILL")
    assert describe_exit(-15) == "was killed by SIGTERM"
    assert describe_exit(-99) == "was killed by signal 99"


def test_a_temporary_directory_with_a_long_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    path = launch._private_directory()
    assert path.startswith("/tmp/") and len(path) < 80
    os.rmdir(path)
    assert not list(long.iterdir())


def test_a_temporary_directory_that_was_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    path = launch._private_directory()
    assert path.startswith("/tmp/")
    os.rmdir(path)

    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(StartError, match="No space left on device"):
        launch._private_directory()


@pytest.mark.some(1)
@pytest.mark.parametrize("command", [launch.COMMAND, api_server.COMMAND], ids=["engine", "api_server"])
def test_a_module_of_the_current_directory_is_not_imported(command: tuple[str, ...], tmp_path: Path) -> None:
    """Otherwise a process started in another checkout would import another tokserve than its parent."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('of the current directory')")
    process = subprocess.run(
        command, stdin=subprocess.DEVNULL, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 1 and "started by" in process.stderr


def test_what_follows_the_setup_of_an_api_process_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, process = socket.socketpair()
    with supervisor, process:
        monkeypatch.setattr(api_server, "SUPERVISOR", process.fileno())
        supervisor.sendall(b'{"config": {}}\n{"address": "ipc:///engine"}\n')
        assert api_server.read_setup() == b'{"config": {}}\n'
        assert process.recv(100) == b'{"address": "ipc:///engine"}\n'


@pytest.mark.slow
def test_an_engine_for_another_node_reports_its_address(tmp_path: Path) -> None:
    async def scene() -> None:
        keys, _ = make_keys()
        engine = EngineProcess(config(tmp_path), host="127.0.0.1", keys=keys)
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", await engine.located())
        await engine.stop(0.0)

    asyncio.run(scene())


def test_an_engine_that_ends_before_it_listens_fails_the_start(mode: Any) -> None:
    mode("exit")

    async def scene() -> None:
        engine = EngineProcess(config(), host="127.0.0.1", keys=make_keys()[0])
        with pytest.raises(StartError, match="ended with exit code 3"):
            await engine.located()
        await engine.stop(0.0)

    asyncio.run(scene())
