"""Starts the processes of ranks on this machine.  Others may start them elsewhere: see `Spawn`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from tokserve.base.errors import StartError
from tokserve.base.processes import describe_exit
from tokserve.config import Config
from tokserve.features.ranks.listeners import INHERITED, Listener, PairListener, SocketListener
from tokserve.features.ranks.worker import RankOpening

COMMAND = (sys.executable, "-P", "-m", "tokserve.features.ranks.worker")  # -P: not a folder `tokserve` of where we are
PATIENCE = 3.0  # seconds between being told to leave and being killed


class RankProcess(Protocol):
    """A rank that was started, wherever it is."""

    @property
    def address(self) -> str | None:
        """The address of its machine, for the other ranks; None: that of its connection."""

    def describe_end(self, patience: float) -> str:
        """How it has ended, in words; waits up to `patience` seconds for the end."""

    def watch(self, ended: Callable[[], object]) -> None:
        """Call `ended`, from any thread, when it has ended, unless the end closes its connection."""

    def end(self) -> None:
        """End it, if it has not ended; it was told to leave, or its engine gives up."""


class Spawn(Protocol):
    """Starts ranks: each connects as its opening says, and sends `Joined`."""

    def listen(self) -> Listener:
        """Where they will connect.  Raises StartError."""

    def start(self, openings: Sequence[RankOpening]) -> list[RankProcess]:
        """Start a process for each.  Raises OSError, StartError."""


class LocalProcess:
    """A child of this process; started from its main thread, with whose end it ends."""

    def __init__(self, opening: RankOpening) -> None:
        self._rank = opening.rank
        inherited = [int(opening.address.removeprefix(INHERITED))] if opening.address.startswith(INHERITED) else []
        try:
            self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, process_group=0, pass_fds=inherited)
        finally:
            for descriptor in inherited:
                os.close(descriptor)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # if it is dead already, its end will tell
            stdin.write(msgspec.json.encode(opening) + b"\n")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def address(self) -> None:
        return None

    def watch(self, ended: Callable[[], object]) -> None:
        """RankProcess protocol: its connection shows it."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None: it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def describe_end(self, patience: float) -> str:
        try:
            return describe_exit(self._process.wait(patience))
        except subprocess.TimeoutExpired:
            return "has closed its connection"

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class LocalSpawn:
    """Spawn protocol: children of this process."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def listen(self) -> Listener:
        """Spawn protocol; ranks of other machines connect as well."""
        parallel = self._config.parallel
        if parallel.nnodes == 1:
            return PairListener()
        return SocketListener((parallel.master_addr, parallel.master_port), cluster_key(self._config))

    def start(self, openings: Sequence[RankOpening]) -> list[RankProcess]:
        """Spawn protocol."""
        started: list[RankProcess] = []
        try:
            for opening in openings:
                started.append(LocalProcess(opening))
        except OSError:
            for process in started:
                process.end()
            raise
        return started


def cluster_key(config: Config) -> bytes:
    """What ranks of other machines must know.  Raises StartError."""
    file = config.parallel.master_key_file
    if config.parallel.nnodes == 1 or file is None:
        return b""
    try:
        key = Path(file).read_bytes().strip()
    except OSError as error:
        raise StartError(f"option master_key_file: {file} cannot be read: {error.strerror}") from None
    if len(key) < 16:
        raise StartError(f"option master_key_file: {file} must hold at least 16 bytes")
    return key
