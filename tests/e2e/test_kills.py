"""Every process of servers with ranks, replicas and several API processes is killed, or the server told to stop, while
requests run: each gets a reply or a clear error, nothing is left, and the server serves again where it should.
"""

from __future__ import annotations

import collections
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.server import Server
from tests.tiny_models import tiny_config, write_checkpoint

GENERATE = "/inference/v1/generate"
PATIENCE = 60.0
LAYOUTS = {"tp-dp": ("-tp", "2", "-dp", "2"), "pp-api": ("-pp", "2", "--api-server-count", "2")}
KINDS = {
    "tp-dp": {"front end": 1, "engine": 2, "rank": 4},
    "pp-api": {"front end": 1, "API process": 2, "engine": 1, "rank": 2},
}
MODULES = {
    "API process": "tokserve.features.fleet.api_server",
    "engine": "tokserve.engine.process",
    "rank": "features.ranks.worker",
}
LOST = {"engine_dead", "engine_restarting", "draining"}  # codes of a 503
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), tiny_config("qwen3"), seed=1)


class Load:
    """Requests without a pause from several threads, streams and others; `outcomes` counts what came of them."""

    def __init__(self, url: str) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self._url = url
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(8)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int) -> None:
        while not self._stopped.is_set():
            try:
                with httpx.Client(base_url=self._url, timeout=PATIENCE) as client:
                    outcome = _ask(client, stream=number % 2 == 0)
            except httpx.TimeoutException as error:
                self.faults.append(f"no answer: {error!r}")
            except httpx.HTTPError as error:
                outcome = f"lost: {type(error).__name__}"
                time.sleep(0.05)
            except (AssertionError, ValueError, KeyError) as error:
                self.faults.append(repr(error))
            self.outcomes[outcome] += 1
            if outcome in LOST:
                time.sleep(0.05)

    def wait(self, count: int) -> None:
        """Until so many more requests have ended with a reply."""
        goal = self.outcomes["length"] + count
        end = time.monotonic() + PATIENCE
        while self.outcomes["length"] < goal:
            assert time.monotonic() < end and not self.faults, (self.outcomes, self.faults)
            time.sleep(0.02)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "a request has no answer"


def _ask(client: httpx.Client, *, stream: bool) -> str:
    """The finish_reason, or the error's code."""
    params = {"max_tokens": 40, "ignore_eos": True, "n": 2}
    body: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": params, "stream": stream}
    answer = client.post(GENERATE, json=body)
    if answer.status_code == 503:
        code: str = answer.json()["error"]["code"]
        assert code in LOST, answer.text
        return code
    assert answer.status_code == 200, answer.text
    if not stream:
        reasons = {choice["finish_reason"] for choice in answer.json()["choices"]}
        assert len(reasons) == 1 and reasons <= {"length", "abort"}, answer.text
        return str(reasons.pop())
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]", answer.text[-300:]
    payloads = [json.loads(event.removeprefix("data: ")) for event in events[:-1] if event.startswith("data: ")]
    errors = [payload["error"]["code"] for payload in payloads if "error" in payload]
    if errors:
        assert errors[0] in LOST, errors
        return str(errors[0])
    ends = {choice["finish_reason"] for payload in payloads for choice in payload["choices"]} - {None}
    assert ends == {"length"} or ends == {"abort"} or ends == {"length", "abort"}, ends
    return "length" if ends == {"length"} else "abort"


def processes(server: Server) -> dict[str, list[psutil.Process]]:
    """The server's processes by kind."""
    front_end = psutil.Process(server.process.pid)
    actual: dict[str, list[psutil.Process]] = {"front end": [front_end]}
    for process in front_end.children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
        kind = next((kind for kind, module in MODULES.items() if module in command), None)
        if kind is not None:
            actual.setdefault(kind, []).append(process)
    return {kind: sorted(group, key=lambda one: one.pid) for kind, group in actual.items()}


def everyone(server: Server) -> list[psutil.Process]:
    return [process for group in processes(server).values() for process in group]


def counts(server: Server) -> dict[str, int]:
    try:
        return {kind: len(group) for kind, group in processes(server).items()}
    except psutil.Error:
        return {}


def segments(group: list[psutil.Process]) -> set[str]:
    """The files of shared memory that the processes have mapped."""
    return {entry.path for process in group for entry in process.memory_maps() if entry.path.startswith("/dev/shm/")}


@contextmanager
def served(model: Path, directory: Path, *flags: str) -> Iterator[tuple[Server, Load]]:
    """A server under load, whose temporary files are in `directory`; nothing of it is left at the end."""
    directory.mkdir()
    options = ("--tokens-only", "--max-model-len", "256", "--max-num-seqs", "8", "--shutdown-timeout", "2")
    with Server(model, *options, *flags, env={"TMPDIR": str(directory)}) as server:
        load = Load(server.url)
        try:
            load.wait(6)
            yield server, load
        finally:
            load.stop()
        everything = [] if server.process.poll() is not None else everyone(server)
        files = segments(everything)
        server.stop()
        assert psutil.wait_procs(everything, PATIENCE)[1] == []
        assert not [path for path in files if Path(path.removesuffix(" (deleted)")).exists()]
        assert list(directory.iterdir()) == []
    assert not load.faults, load.faults


def serves_again(server: Server, layout: str) -> None:
    """Wait until all processes are there, and it is healthy."""
    end = time.monotonic() + PATIENCE
    while counts(server) != KINDS[layout] or server.get("/health").status_code != 200:
        assert time.monotonic() < end, (counts(server), server.log[-20:])
        time.sleep(0.1)


VICTIMS = [
    (layout, kind, number)
    for layout, kinds in KINDS.items()
    for kind, count in kinds.items()
    for number in range(count)
]


@pytest.mark.parametrize(("layout", "kind", "number"), VICTIMS)
def test_kill_9_of_each_process(model: Path, tmp_path: Path, layout: str, kind: str, number: int) -> None:
    """The server runs without --restart-engine."""
    with served(model, tmp_path / "t", *LAYOUTS[layout]) as (server, load):
        before = everyone(server)
        files = segments(before)
        processes(server)[kind][number].kill()
        ends = kind == "front end" or (layout == "pp-api" and kind != "API process")
        if ends:
            code = server.process.wait(PATIENCE)
            assert code == (-signal.SIGKILL if kind == "front end" else 1)
            assert psutil.wait_procs(before, PATIENCE)[1] == []
            assert not [path for path in files if Path(path.removesuffix(" (deleted)")).exists()]
        else:
            if kind == "API process":
                serves_again(server, layout)
            load.wait(120)
    lost = sum(count for outcome, count in load.outcomes.items() if outcome.startswith("lost"))
    assert ends or kind == "API process" or not lost, load.outcomes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kill_9_of_replaceable_processes(model: Path, tmp_path: Path, layout: str) -> None:
    with served(model, tmp_path / "t", *LAYOUTS[layout], "--restart-engine", "20") as (server, load):
        for kind, count in KINDS[layout].items():
            for number in range(count if kind != "front end" else 0):
                lost = sum(count for outcome, count in load.outcomes.items() if outcome.startswith("lost"))
                victim = processes(server)[kind][number]
                victim.kill()
                victim.wait(PATIENCE)
                serves_again(server, layout)
                load.wait(120)
                after = sum(count for outcome, count in load.outcomes.items() if outcome.startswith("lost"))
                assert kind == "API process" or after == lost, load.outcomes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("restart", ["0", "2"])
@pytest.mark.parametrize("sent", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)], ids=["one", "two"])
def test_signals_during_load(model: Path, tmp_path: Path, layout: str, restart: str, sent: tuple[int, ...]) -> None:
    with served(model, tmp_path / "t", *LAYOUTS[layout], "--restart-engine", restart) as (server, _):
        before = everyone(server)
        for number in sent:
            server.process.send_signal(number)
            time.sleep(0.1)
        assert server.process.wait(PATIENCE) == 0, server.log[-20:]
        assert psutil.wait_procs(before, PATIENCE)[1] == []
    assert not any("Traceback" in line for line in server.log), server.log[-40:]
