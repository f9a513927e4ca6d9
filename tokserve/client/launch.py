"""Processes of ours, above all the engine's: started, watched and ended here, with nothing left behind.

The engine gets its address and configuration as one line on stdin, and stdin stays open: when this process
goes, however it goes, the engine reads the end of it and goes too.  The socket lies in a directory that
only this user can enter.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from tokserve.base.curve import ClientKeys, EngineKeys
from tokserve.base.errors import StartError
from tokserve.base.processes import describe_exit, see_log
from tokserve.base.rooms import part
from tokserve.config import Config

COMMAND = (sys.executable, "-P", "-m", "tokserve.engine.process")  # -P: not a folder `tokserve` of where we are
SOCKET = "engine.sock"
MAX_SOCKET_PATH = 100  # bytes; the system's limit is 107
TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL


class ChildProcess:
    """Starts `command` at once.  `exited`: the exit code to come, negative for a signal.  `environment`: by default
    that of this process."""

    def __init__(
        self,
        command: Sequence[str],
        stdin: int,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # a process group of its own: Ctrl-C is for this process, which then ends the others in order
        self._process = subprocess.Popen(command, stdin=stdin, pass_fds=pass_fds, process_group=0, env=environment)
        watch(self._process.pid, self._on_exit)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    def _on_exit(self) -> None:
        code = self._process.wait()
        if not self.exited.done():
            self.exited.set_result(code)

    async def stop(self, patience: float) -> int:
        """Wait `patience` seconds for an end that was asked for, then end it; returns the exit code."""
        try:
            if not await self._ends_within(patience):
                self._process.send_signal(signal.SIGTERM)
                if not await self._ends_within(TERM_SECONDS):
                    self._process.kill()
                    await asyncio.wait([self.exited])
        finally:
            if not self.exited.done():  # stopped from stopping: do not leave it behind
                self._process.kill()
        return self.exited.result()

    async def _ends_within(self, seconds: float) -> bool:
        done, _ = await asyncio.wait([self.exited], timeout=seconds)
        return bool(done)


class EngineHandle(Protocol):
    """An engine that was started here, wherever it runs.  `address` and `pid` hold when `located` has returned; `keys`
    are for an engine on another node.  `exited` has a result when it has ended."""

    address: str
    exited: asyncio.Future[int]

    @property
    def pid(self) -> int: ...

    @property
    def keys(self) -> ClientKeys | None: ...

    async def located(self) -> str:
        """The address, as soon as there is one.  Raises StartError."""

    def describe_end(self) -> str:
        """Describe in words how it has ended."""

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""

    async def stop(self, patience: float) -> int:
        """Wait `patience` seconds for an end that was asked for, then end it; returns the exit code."""


class EngineProcess(ChildProcess):
    """The engine (or `command`), and the private directory of its socket.  `name`: in its log.  With `host`, an address
    of this machine, it listens there at a free port, for the client that has the keys' other half."""

    keys: ClientKeys | None = None  # it is on this machine

    def __init__(
        self,
        config: Config,
        command: Sequence[str] | None = None,
        *,
        name: str = "engine",
        environment: Mapping[str, str] | None = None,
        host: str | None = None,
        keys: EngineKeys | None = None,
    ) -> None:
        directory = None if host else _private_directory()
        self.address = f"tcp://{host}:*" if host else f"ipc://{directory}/{SOCKET}"
        receiving, sending = os.pipe()
        self._reported: int | None = None
        report: int | None = None
        if host:
            self._reported, report = os.pipe()
        self._close_stdin = weakref.finalize(self, _close_stdin, os.getpid(), sending, directory)
        inherited = () if report is None else (report,)
        try:
            super().__init__(command or COMMAND, receiving, inherited, environment)
        finally:
            for descriptor in (receiving, *inherited):
                os.close(descriptor)
        values = {"address": self.address, "config": config, "name": name, "keys": keys, "report": report}
        opening = msgspec.json.encode(values) + b"\n"
        with suppress(BrokenPipeError), open(sending, "wb", closefd=False) as stdin:
            stdin.write(opening)  # if it is dead already, `exited` will tell

    async def located(self) -> str:
        """The address; with `host`, when the engine has bound a port.  Raises StartError."""
        if self._reported is not None:
            with open(self._reported, encoding="ascii") as reported:
                self._reported = None
                self.address = await asyncio.to_thread(reported.read)
            if not self.address:
                await asyncio.wait([self.exited])
                raise StartError(see_log(self.describe_end()))
        return self.address

    def describe_end(self) -> str:
        return f"the engine process {describe_exit(self.exited.result())}"

    async def stop(self, patience: float) -> int:
        """Stop the process as any other, and remove the directory."""
        try:
            return await super().stop(patience)
        finally:
            self._close_stdin()


def start_engine(config: Config, name: str, environment: Mapping[str, str] | None = None) -> EngineHandle:
    """Start an engine where `config` says: as a child process of this one, or on a node of a Ray cluster.  `name`: in
    its log.  `environment`: of a child process.  Raises StartError, OSError."""
    if (option := config.parallel.on_ray) is not None:
        part("ray", "prepare")(option)
    if config.parallel.data_parallel_backend != "ray":
        return EngineProcess(config, name=name, environment=environment)
    engine: EngineHandle = part("ray", "engine")(config, name)
    return engine


def watch(pid: int, then: Callable[[], object]) -> Callable[[], None]:
    """Call `then` in the running loop when a process has ended, which need not be a child of this one.  Returns a
    function that ends the watch, in the same loop."""
    loop = asyncio.get_running_loop()
    descriptor, is_open = os.pidfd_open(pid), True

    def forget() -> None:
        nonlocal is_open
        if is_open:
            is_open = False
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def ended() -> None:
        forget()
        then()

    loop.add_reader(descriptor, ended)
    return forget


def _close_stdin(owner: int, stdin: int, directory: str | None) -> None:
    """The engine reads the end of its stdin and leaves; runs on `stop`, when the owner is collected, or at exit."""
    os.close(stdin)
    if directory is not None and os.getpid() == owner:  # not in a fork of it
        shutil.rmtree(directory, ignore_errors=True)


def _private_directory() -> str:
    """A new directory of mode 700 with a path short enough for a socket."""
    failed: OSError | None = None
    for parent in (None, "/tmp"):
        try:
            path = tempfile.mkdtemp(prefix="tokserve-", dir=parent)
        except OSError as error:  # it is full, or was removed
            failed = failed or error
            continue
        if len(os.fsencode(f"{path}/{SOCKET}")) <= MAX_SOCKET_PATH:
            return path
        os.rmdir(path)
    raise StartError(f"cannot make a temporary directory for the engine's socket: {failed}")
