"""Engines on the nodes of a Ray cluster: an actor reserves the CPUs or the GPU of one, and starts its process there.

The process listens at its node's address for the one client that has its keys (`curve`), which go to the node by Ray's
own transport.  Ray ends the actor when this process goes, and the engine then reads the end of its stdin, as it does on
one machine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

import tokserve
from tokserve.base.curve import EngineKeys, make_keys
from tokserve.base.errors import StartError
from tokserve.base.processes import describe_exit
from tokserve.client.launch import TERM_SECONDS, EngineProcess
from tokserve.config import Config
from tokserve.config.engine_config import reserved_devices
from tokserve.ray.cluster import connect, first_line

logger = logging.getLogger(__name__)

LOST = 1 << 16  # in the place of an exit code: the node or the actor is gone
REMIND = 10.0  # seconds without a place before the log says what is waited for
ANSWER = 5.0  # seconds for a node's answer that the engine has ended


class Assignment(msgspec.Struct, frozen=True):
    """What an actor is to start.  `version`: of this package where the engine's client runs."""

    config: Config
    name: str
    keys: EngineKeys
    version: str


class EngineActor:
    """An engine process on a node, its end, and signals to it.  Errors that a user can mend are returned as text."""

    def __init__(self) -> None:
        self._process: EngineProcess | None = None

    async def start(self, packed: bytes) -> tuple[str, int, str | None]:
        """Start what an encoded `Assignment` says; returns its address and process id, or an error."""
        node = ray.util.get_node_ip_address()
        version = msgspec.json.decode(packed)["version"]
        if version != tokserve.__version__:
            return "", 0, f"node {node} has tokserve {tokserve.__version__}, and the front end {version}"
        assignment = msgspec.json.decode(packed, type=Assignment)
        try:
            self._process = EngineProcess(assignment.config, name=assignment.name, host=node, keys=assignment.keys)
            return await self._process.located(), self._process.pid, None
        except (StartError, OSError) as error:
            return "", 0, f"on node {node}: {error}"

    async def ended(self) -> int:
        assert self._process is not None
        return await asyncio.shield(self._process.exited)

    async def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(number)

    async def stop(self, patience: float) -> int:
        """See `ChildProcess.stop`."""
        return 0 if self._process is None else await self._process.stop(patience)


class RayEngine:
    """Asks Ray at once for a place and starts an engine there; see `EngineHandle`."""

    def __init__(self, config: Config, name: str) -> None:
        self.address, self.pid = "", 0
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        keys, self.keys = make_keys()
        self._name = name
        self._actor: Any = None
        self._placing = asyncio.ensure_future(self._place(Assignment(config, name, keys, tokserve.__version__)))
        self._watching: asyncio.Task[None] | None = None

    async def located(self) -> str:
        """The engine's address, as soon as Ray has found a place.  Raises StartError."""
        return await asyncio.shield(self._placing)

    async def _place(self, assignment: Assignment) -> str:
        await _joined_cluster(show_logs=assignment.config.logs.log_format == "text")
        resources = reserved_devices(assignment.config.runtime)
        actor_class = ray.remote(EngineActor)
        # engines go to different nodes where there are enough
        self._actor = actor_class.options(scheduling_strategy="SPREAD", max_restarts=0, **resources).remote()
        reminder = asyncio.get_running_loop().call_later(
            REMIND, logger.warning, "the %s waits for a node of the Ray cluster with %s", self._name, resources
        )
        try:
            self.address, self.pid, error = await self._actor.start.remote(msgspec.json.encode(assignment))
        except RayError as failure:
            raise StartError(f"the {self._name} cannot run in the Ray cluster: {failure}") from None
        finally:
            reminder.cancel()
        if error is not None:
            raise StartError(f"the {self._name} failed to start {error}")
        self._watching = asyncio.ensure_future(self._watch())
        logger.info("the %s runs at %s", self._name, self.address)
        return self.address

    async def _watch(self) -> None:
        try:
            code = await self._actor.ended.remote()
        except RayError as error:
            logger.warning("the %s at %s was lost: %s", self._name, self.address, first_line(error))
            code = LOST
        if not self.exited.done():
            self.exited.set_result(code)

    def describe_end(self) -> str:
        from_node = f"on node {self.address.removeprefix('tcp://')}"
        code = self.exited.result()
        if code == LOST:
            return f"its Ray actor {from_node} is gone"
        return f"the engine process {from_node} {describe_exit(code)}"

    def signal(self, number: int) -> None:
        if self._actor is not None and not self.exited.done():
            self._actor.signal.remote(number)

    async def stop(self, patience: float) -> int:
        """Stop the process as one of this machine, and remove the actor."""
        self._placing.cancel()
        if self._actor is not None:
            if not self.exited.done():
                with suppress(RayError, TimeoutError):
                    async with asyncio.timeout(patience + TERM_SECONDS + ANSWER):
                        await self._actor.stop.remote(patience)
            with suppress(RayError):
                ray.kill(self._actor)
        if self._watching is not None:
            self._watching.cancel()
        if not self.exited.done():
            self.exited.set_result(0)
        return self.exited.result()


async def _joined_cluster(show_logs: bool) -> None:
    """`connect` in a thread that the end of this process does not wait for: Ray retries for ever."""
    loop = asyncio.get_running_loop()
    joined: asyncio.Future[None] = loop.create_future()

    def join() -> None:
        error: StartError | None = None
        try:
            connect(show_logs)
        except StartError as failure:
            error = failure
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(report, error)

    def report(error: StartError | None) -> None:
        if joined.done():
            return
        if error is None:
            joined.set_result(None)
        else:
            joined.set_exception(error)

    threading.Thread(target=join, name="ray", daemon=True).start()
    await joined
