"""Starts the processes of ranks on this machine.  Others may start them elsewhere: see `Spawn`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from tokserve.executor.worker import RankOpening

COMMAND = (sys.executable, "-P", "-m", "tokserve.executor.worker")  # -P: not a folder `tokserve` of where we are
PATIENCE = 3.0  # seconds between being told to leave and being killed


class RankProcess(Protocol):
    """A rank that was started, wherever it is."""

    def describe_end(self, patience: float) -> str:
        """How it has ended, in words; waits up to `patience` seconds for the end."""

    def end(self) -> None:
        """End it, if it has not ended; it was told to leave, or its engine gives up."""


class Spawn(Protocol):
    """Starts ranks: each connects to the `address` of its opening and sends `Joined`."""

    def __call__(self, openings: Sequence[RankOpening]) -> list[RankProcess]:
        """Start one process for each."""


class LocalProcess:
    """A child of this process; started from its main thread, with whose end it ends."""

    def __init__(self, opening: RankOpening) -> None:
        self._rank = opening.rank
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, process_group=0)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # if it is dead already, its end will tell
            stdin.write(msgspec.json.encode(opening) + b"\n")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None: it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def describe_end(self, patience: float) -> str:
        """RankProcess protocol."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def end(self) -> None:
        """RankProcess protocol."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def spawn_local(openings: Sequence[RankOpening]) -> list[RankProcess]:
    """As children of this process.  Raises OSError."""
    started: list[RankProcess] = []
    try:
        for opening in openings:
            started.append(LocalProcess(opening))
    except OSError:
        for process in started:
            process.end()
        raise
    return started
