"""The engine behind real sockets: in a thread, or as a process where the test kills it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
import pytest

from tests.engine.front import Front
from tests.engine.harness import Received
from tests.engine.scripted import ScriptedExecutor
from tests.engine.solo import EOS, engine_request, solo
from tests.outputs import unpack
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.engine import process
from tokserve.engine.core import EngineCore
from tokserve.protocol.messages import (
    Call,
    Dead,
    FromEngine,
    Ready,
    Reply,
    Status,
    StepOutput,
    Submit,
    SubmitReply,
)
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import DeviceFacts

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
ROOT = Path(__file__).parents[2]


def make_config(**options: Any) -> Config:
    return Config.make(model="scripted", max_model_len=64, eos_token_ids=list(EOS), **options)


class Running:
    """`process.run` in a thread."""

    def __init__(self, address: str, change: Callable[[ScriptedExecutor], None] | None = None, **options: Any) -> None:
        config = make_config(**options)
        self.executor = ScriptedExecutor(config)
        if change is not None:
            change(self.executor)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(address, config), daemon=True)  # a failed test ends
        self._thread.start()

    def _run(self, address: str, config: Config) -> None:
        self.code = process.run(address, config, self.executor)

    def join(self) -> int | None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the engine does not end"
        return self.code


def add(rid: str, *, seed: int = 0, stream: bool = False, prompt: tuple[int, ...] = (3, 4), **params: Any) -> Submit:
    return Submit(99, rid, [engine_request(rid, prompt, SamplingParams(**params), seed, stream=stream)])


def gather(front: Front, *rids: str) -> dict[str, Received]:
    """Receive messages until these requests have ended."""
    received = {rid: Received() for rid in rids}
    while any(outcome.finish is None for outcome in received.values()):
        message = front.receive()
        if message == SubmitReply(99):
            continue
        assert isinstance(message, StepOutput), message
        for output in unpack(message):
            received[output.rid].take(output)
    return received


def answer(front: Front, kind: type[FromEngine], waiting: Callable[[], None] | None = None) -> Any:
    """The next message of a kind; `waiting` is called whenever a while passes without any."""
    while True:
        while waiting is not None and not front.socket.poll(100):
            waiting()
        if isinstance(message := front.receive(), kind):
            return message


@DEPTHS
def test_an_engine_from_hello_to_shutdown(address: str, depth: int) -> None:
    running = Running(address, depth=depth)
    with Front(address) as front:
        assert front.hello() == Ready(64, 20, 64, 4, list(EOS), "v1", {"scripted": True}, Status(weight_version="v1"))
        params: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logprobs": 1}
        front.send(add("a", seed=1, **params))
        front.send(add("b", seed=2, stream=False, **params))
        for seed, received in enumerate(gather(front, "a", "b").values(), 1):
            expected = solo([3, 4], SamplingParams(**params), seed, 64)
            assert (received.tokens, received.logprobs) == (expected.tokens, expected.logprobs)
        permits = running.executor.permits = threading.Semaphore(0)  # "c" cannot end before its abort arrives
        front.send(add("c", ignore_eos=True))
        front.send(Call(7, "abort", {"keys": ["c", "a", "x"]}))
        reply = answer(front, Reply, waiting=permits.release)
        running.executor.permits = None
        assert reply == Reply(7, {"c": "aborted", "a": "finished", "x": "not_found"})
        front.send(Call(8, "shutdown"))
        assert answer(front, Reply) == Reply(8, {})
    assert running.join() == 0
    assert running.executor.closed


def test_two_front_ends_and_one_that_leaves(address: str) -> None:
    running = Running(address)
    with Front(address) as front:
        front.hello()
        with Front(address) as other:
            other.hello()
            other.send(add("other", ignore_eos=True, max_tokens=60))
            front.send(add("mine", ignore_eos=True, max_tokens=60, seed=3))
            answer(other, StepOutput)
        assert gather(front, "mine")["mine"].tokens == solo([3, 4], running_params(60), 3, 64).tokens
        front.send(Call(1, "shutdown"))
        answer(front, Reply)
    assert running.join() == 0


def running_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(ignore_eos=True, max_tokens=max_tokens)


def test_a_crash_is_sent_to_all_front_ends_and_logged_with_the_plan(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(executor: ScriptedExecutor) -> None:
        executor.fail_at = 3

    running = Running(address, fail)
    with Front(address) as one, Front(address) as two:
        one.hello()
        two.hello()
        one.send(add("a", ignore_eos=True))
        for front in (one, two):
            dead = answer(front, Dead)
            assert "on fire" in dead.reason and not dead.expected
    assert running.join() == 1
    assert "step 3: 1 rows, 1 tokens" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize(("error", "expected"), [(StartError("no such model"), True), (OSError("broken"), False)])
def test_a_failed_start_is_reported(address: str, error: Exception, expected: bool) -> None:
    def fail(executor: ScriptedExecutor) -> None:
        executor.start_error = error

    with Front(address) as front:
        front.send(Call(0, "hello"))
        running = Running(address, fail)
        dead = answer(front, Dead)
    assert str(error) in dead.reason and dead.expected is expected
    assert running.join() == 1


def test_a_failed_start_without_a_client_ends(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "FIRST_HELLO", 0.05)

    def fail(executor: ScriptedExecutor) -> None:
        executor.start_error = StartError("no such model")

    assert Running(address, fail).join() == 1


def test_an_address_that_cannot_be_bound_ends(tmp_path: Path) -> None:
    assert Running(f"ipc://{tmp_path}/no/such/place").join() == 1


def test_hello_during_start_up_is_answered_when_ready(address: str) -> None:
    loaded = threading.Event()

    def slow(executor: ScriptedExecutor) -> None:
        start = executor.start

        def wait() -> DeviceFacts:
            loaded.wait(60)
            return start()

        executor.start = wait  # type: ignore[method-assign]

    running = Running(address, slow)
    with Front(address) as front:
        front.send(Call(0, "hello"))
        front.send(Call(1, "ping"))
        assert not front.socket.poll(50)
        loaded.set()
        assert isinstance(front.receive(), Ready)
        assert front.receive() == Reply(1, {})
        front.send(Call(2, "shutdown"))
        answer(front, Reply)
    assert running.join() == 0


@DEPTHS
def test_an_idle_engine_does_not_poll(address: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    step = EngineCore.step
    monkeypatch.setattr(EngineCore, "step", lambda self: turns.append(0) or step(self))
    running = Running(address, depth=depth)
    with Front(address) as front:
        front.hello()
        front.send(add("a", ignore_eos=True, max_tokens=5))
        gather(front, "a")
        front.send(Call(1, "ping"))
        answer(front, Reply)
        for _ in range(100):  # an engine that spins never passes
            before = len(turns)
            time.sleep(0.2)
            if len(turns) == before:
                break
        else:
            raise AssertionError("the loop turns with nothing to do")
        front.send(Call(2, "shutdown"))
        answer(front, Reply)
    assert running.join() == 0


# --- as a process ---


class Child:
    """`python -m tests.engine.scripted_process`, ready to serve."""

    def __init__(self, address: str, **options: Any) -> None:
        self.address = address
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.scripted_process"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        self.stdin.write(opening(address, **options))
        self.stdin.flush()

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    def end(self) -> tuple[int, str]:
        """Exit code and log."""
        assert self.process.stderr is not None
        log = self.process.stderr.read().decode()
        return self.process.wait(60), log


def opening(address: str, **options: Any) -> bytes:
    line = {"address": address, "config": msgspec.to_builtins(make_config(**options))}
    return json.dumps(line).encode() + b"\n"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    directory = tmp_path / "tokserve-abc"
    directory.mkdir()
    running = Child(f"ipc://{directory}/engine.sock", depth=2)
    yield running
    running.process.kill()
    running.process.wait()
    for pipe in (running.process.stdin, running.process.stderr):
        if pipe is not None:
            pipe.close()


def busy(child: Child) -> Front:
    """A front end whose request is running."""
    front = Front(child.address)
    assert isinstance(front.hello(), Ready)
    front.send(add("a", ignore_eos=True))
    answer(front, StepOutput)
    return front


def test_the_engine_leaves_with_its_parent(child: Child) -> None:
    with busy(child):
        child.stdin.close()
        code, log = child.end()
    assert code == 0 and "parent process is gone" in log
    assert not Path(child.address.removeprefix("ipc://")).parent.exists()  # its socket's directory went along


def test_sigterm_ends_it_with_zero_and_sigint_and_sighup_do_nothing(child: Child) -> None:
    with busy(child) as front:
        child.process.send_signal(signal.SIGINT)
        child.process.send_signal(signal.SIGHUP)
        front.send(Call(3, "ping"))
        assert answer(front, Reply) == Reply(3, {})
        child.process.send_signal(signal.SIGTERM)
        code, log = child.end()
    assert code == 0 and "SIGTERM" in log
    assert "INFO" in log and "loaded in" in log  # start-up is told phase by phase


@pytest.mark.slow
def test_shutdown_ends_it_with_zero(child: Child) -> None:
    with busy(child) as front:
        front.send(Call(3, "shutdown"))
        assert answer(front, Reply).call_id == 3
    assert child.end()[0] == 0


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "tests.engine.scripted_process"], stdin=subprocess.PIPE)
child.stdin.write(sys.stdin.buffer.readline())
child.stdin.flush()
fork = os.fork() if "fork" in sys.argv else 1
if fork:
    print(child.pid, fork, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("variant", ["alone", "fork"])
def test_the_engine_does_not_outlive_a_killed_parent(address: str, variant: str) -> None:
    """Nor if a fork of the parent lives on and holds the pipe to its stdin open."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, variant],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    with parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(opening(address))
        parent.stdin.flush()
        pid, fork = map(int, parent.stdout.readline().split())
        engine = psutil.Process(pid)
        with Front(address) as front:
            front.hello()
            os.kill(parent.pid, signal.SIGKILL)
            engine.wait(120)
            assert not Path(address.removeprefix("ipc://")).exists()
        if variant == "fork":
            os.kill(fork, signal.SIGKILL)


def test_without_the_opening_message_the_error_names_the_starting_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokserve.engine.process"], input=b"", capture_output=True, cwd=ROOT, check=False
    )
    assert done.returncode == 1 and b"tokserve serve" in done.stderr
