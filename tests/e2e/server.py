"""A real `tokserve serve` process for tests: started from the command line, on a free port, killed at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.replies import good
from tests.waiting import PATIENCE

START_SECONDS = 300.0
NO_TLS = False  # httpx's `verify`: it reads the authorities' certificates, 20 ms, for each request outside a client


class Served(ABC):
    """A server at `url`, wherever it runs, and what tests ask of it."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Base URL; waits until the server serves."""

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        """POST JSON."""
        return httpx.post(self.url + path, json=body, timeout=600, verify=NO_TLS, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        """GET."""
        return httpx.get(self.url + path, timeout=600, verify=NO_TLS, **kwargs)

    def generate(self, token_ids: list[int], **params: Any) -> dict[str, Any]:
        """The reply of /inference/v1/generate for these sampling parameters."""
        return good(self.post("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": params}))

    def metric(self, name: str) -> float:
        """The value of an unlabelled (or once-labelled) metric, summed over labels."""
        lines = [line for line in self.get("/metrics").text.splitlines() if re.match(rf"{re.escape(name)}[ {{]", line)]
        assert lines, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_idle(self, seconds: float = PATIENCE) -> None:
        """Until the engine runs and holds nothing."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            running = self.metric("tokserve:num_requests_running") + self.metric("tokserve:num_requests_waiting")
            if running == 0 and self.metric("tokserve:kv_cache_usage_perc") == 0.0:
                return
            time.sleep(0.1)
        raise AssertionError("the engine did not become idle")


class Server(Served):
    """`with Server("demo", "--max-num-seqs", "4") as server: server.post(...)`.  `log` holds stderr's lines."""

    def __init__(self, model: str | Path, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "tokserve", "serve", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, **(env or {})}
        )
        self.log: list[str] = []
        self._url: str | None = None
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if match := re.search(r"serving on (\S+),", line):
                self._url = match.group(1)
                self._started.set()
        self._started.set()

    @property
    def url(self) -> str:
        """Base URL; waits until the server serves."""
        assert self._started.wait(START_SECONDS), "\n".join(self.log)
        assert self._url, "\n".join(self.log)
        return self._url

    def __enter__(self) -> Server:
        try:
            _ = self.url
        except AssertionError:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, sig: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(10)
        assert self.process.stderr
        self.process.stderr.close()
        return code

    def engine(self) -> psutil.Process:
        """The engine's process."""
        return next(iter(self.engines()))

    def engines(self) -> list[psutil.Process]:
        """The processes of all engines that run or start."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return [p for p in children if "tokserve.engine.process" in " ".join(p.cmdline())]

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks of all engines."""
        children = [child for engine in self.engines() for child in engine.children()]
        return [p for p in children if "tokserve.features.ranks.worker" in " ".join(p.cmdline())]

    def api_processes(self) -> list[psutil.Process]:
        """The API processes of a server that has several, oldest first."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        actual = [p for p in children if "tokserve.features.fleet.api_server" in " ".join(p.cmdline())]
        return sorted(actual, key=lambda p: (p.create_time(), p.pid))
