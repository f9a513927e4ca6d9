"""The processes that `peers.py` compares: a server over HTTP, and llama.cpp behind a pipe.

Starts each peer, waits until it is ready, and measures its memory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

MAX_MODEL_LEN = 2048
START_SECONDS = 600.0
MIB = 1 << 20


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Process:
    """A started peer, to be stopped whatever happens; `wait_ready` says how long it took until it could be asked."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: dict[str, str], piped: bool = False) -> None:
        self.name = name
        pipe = subprocess.PIPE if piped else None
        self._began = time.perf_counter()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or file,
                stderr=file,
                env=os.environ | env,
                start_new_session=True,
            )
        self._log = log

    def wait_ready(self) -> float:
        """Seconds from the start until it was ready; ends the program if it does not get there."""
        while not self._is_ready():
            self._check_alive()
            time.sleep(0.02)
        return time.perf_counter() - self._began

    def _is_ready(self) -> bool:
        raise NotImplementedError

    def _check_alive(self) -> None:
        late = time.perf_counter() - self._began > START_SECONDS
        if self._process.poll() is not None or late:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise SystemExit(f"{self.name} {'is not ready in time' if late else 'ended while starting'}:\n{tail}")

    @property
    def pid(self) -> int:
        """The process that was started."""
        return self._process.pid

    def resident_mib(self) -> float:
        """Resident memory of the process and all below it; pages they share are counted in each."""
        top = psutil.Process(self._process.pid)
        return sum(float(process.memory_info().rss) for process in [top, *top.children(recursive=True)]) / MIB

    def stop(self) -> None:
        """End the process and everything in its session."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class HttpServer(Process):
    """A server that is ready when /health answers 200."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: dict[str, str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(name, [*command, "--port", str(port)], log, env)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def tokserve(
    model: str, kv_gib: int, flags: Sequence[str], log: Path, name: str = "tokserve", python: str = sys.executable
) -> HttpServer:
    """The server of this repository, or of another Python's environment, on all cores."""
    command = [python, "-P", "-m", "tokserve", "serve", model]  # -P: its own, not that of the current directory
    command += ["--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--spec-method", "none"]  # random weights repeat themselves: drafts would be what is measured
    return HttpServer(name, [*command, "--kv-cache-memory-bytes", f"{kv_gib}G", *flags], log, {})


def vllm(python: str, model: str, kv_gib: int, flags: Sequence[str], log: Path) -> HttpServer:
    """vLLM's CPU build with every core (by default it keeps one back) and the token route switched on."""
    command = [str(Path(python).parent / "vllm"), "serve", model, "--max-model-len", str(MAX_MODEL_LEN)]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    return HttpServer("vLLM", [*command, "--enable-scale-out", *flags], log, env)


class Llama(Process):
    """llama.cpp in a process of its own (`llama_worker.py`), asked over its standard input."""

    def __init__(self, python: str, gguf: str, log: Path) -> None:
        name = f"llama.cpp {Path(gguf).stem.rpartition('-')[2]}"
        worker = str(Path(__file__).with_name("llama_worker.py"))
        threads = str(len(os.sched_getaffinity(0)))
        super().__init__(name, [python, worker, gguf, "--threads", threads], log, {}, piped=True)

    def _is_ready(self) -> bool:
        return bool(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(30)
            self._check_alive()
        return json.loads(line)

    def ask(self, **case: int) -> float:
        """The figure of one case; see `llama_worker.py`."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(case).encode() + b"\n")
        self._process.stdin.flush()
        return float(self._answer()["value"])
