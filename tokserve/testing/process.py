"""`ServerProcess`: a server on a free port, which ends with its `with` block or with the process that started it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import msgspec

from tokserve.config import Config

if TYPE_CHECKING:
    from tokserve.rl import TokserveClient

SERVING = re.compile(r"serving on (\S+), ready")
SHOWN = 50  # lines of the log in a message


class ServerFailed(AssertionError):
    """The server did not start, or did not end; the message holds the end of its log."""


class ServerProcess:
    """A `tokserve serve` process with these options; use as a context manager.  Raises StartError for an unknown one.
    `log`: the lines that it has logged so far; they are added to an error that leaves the block."""

    module = "tokserve.testing.serve"

    def __init__(self, options: dict[str, Any], *, start_seconds: float = 120.0, stop_seconds: float = 30.0) -> None:
        self.log: list[str] = []
        self._start_seconds, self._stop_seconds = start_seconds, stop_seconds
        self._url: str | None = None
        self._client: TokserveClient | None = None
        self._started = threading.Event()
        config = Config.make(**{"port": 0, **options})
        self._channel, remote = socket.socketpair()
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, str(remote.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=[remote.fileno()],
            )
        self._channel.sendall(msgspec.json.encode(config) + b"\n")
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """The base URL, once the server serves.  Raises ServerFailed."""
        if not self._started.wait(self._start_seconds) or self._url is None:
            self.stop(signal.SIGKILL)
            raise ServerFailed(self._with_log("the server did not start"))
        return self._url

    @property
    def client(self) -> TokserveClient:
        """A client of the server, the same one each time: for one event loop, which closes it (`async with`)."""
        if self._client is None:
            from tokserve.rl import TokserveClient

            self._client = TokserveClient(self.url)
        return self._client

    def __enter__(self) -> Self:
        _ = self.url
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            self.stop()
        finally:
            if error is not None:
                error.add_note(self._with_log("the server"))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code.  Raises ServerFailed if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(self._stop_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise ServerFailed(self._with_log("the server did not end")) from None
        finally:
            self._reader.join(10)
            self._channel.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.log.append(line.rstrip("\n"))
                if match := SERVING.search(line):
                    self._url = match.group(1)
                    self._started.set()
        self._started.set()

    def _with_log(self, what: str) -> str:
        return "\n  ".join([f"{what}; its log:", *self.log[-SHOWN:]])


def server(model: str | os.PathLike[str] = "demo", *, start_seconds: float = 120.0, **options: Any) -> ServerProcess:
    """A server of `model` (a directory, a hub name, or "demo") on a free port of this machine.

    `options` are those of the command line by their Python names (`tokens_only=True`, `max_num_seqs=4`).  Raises
    StartError for an unknown one; entering the block raises ServerFailed if the server does not start in time.
    """
    return ServerProcess({"model": model, **options}, start_seconds=start_seconds)
