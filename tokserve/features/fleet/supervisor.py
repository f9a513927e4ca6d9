"""Runs several API processes at one address with one engine: starts, replaces and stops them.

The supervisor owns the engine and the sockets, and serves no requests.  An API process that dies is replaced, after the
engine has dropped its requests; when the engine is replaced, all processes receive its address.  The processes share
only the engine and the counters in shared memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any

import msgspec

from tokserve.base.errors import EngineDead, StartError
from tokserve.base.processes import describe_exit
from tokserve.base.rooms import contributions
from tokserve.cli import listen
from tokserve.cli.http import Signals
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.launch import ChildProcess
from tokserve.config import Config
from tokserve.features.fleet.api_server import COMMAND, ApiProcessSetup, EngineLocation, StartReport
from tokserve.features.observe.counters import create_shared_memory
from tokserve.server.api_process import ApiProcess

logger = logging.getLogger("tokserve.serve")
REPORT_SIZE = 1 << 16
TRIES = 3  # starts of an API process, with one engine, before the server gives up
PAUSE = 1.0  # seconds between two starts: a resource such as a descriptor may be free again


class ApiChildProcess(ChildProcess):
    """A started API process.  `ready` resolves to None when it can serve, or to the error."""

    def __init__(self, setup: ApiProcessSetup) -> None:
        self.name = setup.name
        self.ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._channel, child_end = socket.socketpair()
        descriptors = {setup.listening, setup.api_process.counters}
        with child_end:
            super().__init__(COMMAND, child_end.fileno(), [fd for fd in descriptors if fd is not None])
        with suppress(BrokenPipeError):  # if it has died, `exited` says so
            self._channel.sendall(msgspec.json.encode(setup) + b"\n")
        asyncio.get_running_loop().add_reader(self._channel, self._on_report)
        self.exited.add_done_callback(self._on_end)

    def send_engine(self, engine: EngineLocation) -> None:
        """Tell the process where the new engine is."""
        with suppress(OSError):  # the process has ended
            self._channel.sendall(msgspec.json.encode(engine) + b"\n")

    def _on_report(self) -> None:
        line = b""
        with suppress(ConnectionError):
            line = self._channel.recv(REPORT_SIZE)
        if line:
            self._set_ready(msgspec.json.decode(line, type=StartReport).error)
        else:
            asyncio.get_running_loop().remove_reader(self._channel)

    def _on_end(self, exited: asyncio.Future[int]) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        self._set_ready(f"an API process {describe_exit(exited.result())}")

    def _set_ready(self, error: str | None) -> None:
        if not self.ready.done():
            self.ready.set_result(error)


class Supervisor:
    """Call `start`, `serve`, and in any case `end`.  `llm` owns the engine and sends no requests."""

    def __init__(self, config: Config, sock: socket.socket) -> None:
        self.llm = AsyncLLM.from_config(config, text=False)
        self.llm.on_replaced(self._on_replaced)
        self._config = config
        self._count = config.server.api_server_count
        self._sockets = listen.spread(sock, self._count)
        self._counters = create_shared_memory(self._count)
        self._created = int(time.time())
        self._processes: dict[int, ApiChildProcess] = {}
        self._services: dict[str, Any] = {}  # what it hosts for the API processes, by the name of a room
        self._num_started = 0
        self._stopping = False

    async def start(self) -> None:
        """Start the engine and the API processes; returns when all can serve.  Raises StartError."""
        tasks = [asyncio.create_task(self.llm.start())]
        try:
            await asyncio.sleep(0)  # starts the engine's process, or fails
            if tasks[0].done():
                tasks[0].result()
            services = ((name, make(self._config)) for name, make in contributions("shared"))
            self._services = {name: service for name, service in services if service is not None}
            for index in range(self._count):
                self._launch(index)
            tasks.append(asyncio.create_task(self._all_ready()))
            await asyncio.wait(tasks, return_when="FIRST_EXCEPTION")
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
        for listener in self._sockets:
            listen.begin(listener, self._config)

    def _launch(self, index: int) -> None:
        address, pid = self.llm.engine
        self._num_started += 1
        name = f"api-{index}-{self._num_started}"
        services = {room: service.address for room, service in self._services.items()}
        api_process = ApiProcess(index, self._created, self._counters, services)
        setup = ApiProcessSetup(self._config, name, address, pid, self._sockets[index].fileno(), api_process)
        try:
            self._processes[index] = ApiChildProcess(setup)
        except OSError as error:  # no descriptor or no process is left
            raise StartError(f"API process {index} could not be started: {error.strerror}") from None

    async def _all_ready(self) -> None:
        for process in self._processes.values():
            error = await process.ready
            if error is not None:
                raise StartError(error)

    async def serve(self, sock: socket.socket, signals: Signals) -> int:
        """Serve until a signal or the engine's death; returns the exit code."""
        signals.act = self._stop
        keeping = [asyncio.create_task(self._keep(index)) for index in range(self._count)]
        done, others = await asyncio.wait(keeping, return_when="FIRST_EXCEPTION")
        for task in others:
            task.cancel()
        for task in done:
            task.result()
        return 1 if self.llm.dead else 0

    def _on_replaced(self) -> None:
        engine = EngineLocation() if self.llm.dead else EngineLocation(*self.llm.engine)
        for process in self._processes.values():
            process.send_engine(engine)

    def _stop(self) -> None:
        """Send SIGTERM to all processes: the first time they drain, the second time they abort requests."""
        logger.info("stopping: the API processes %s", "hang up" if self._stopping else "drain")
        self._stopping = True
        for listener in self._sockets:  # so that no connection waits at the socket of a process that ends
            listener.close()
        for process in self._processes.values():
            process.signal(signal.SIGTERM)

    async def _keep(self, index: int) -> None:
        """Replace an API process whenever it ends, until the server stops.  Raises StartError if that fails."""
        while True:
            process = self._processes[index]
            code = await asyncio.shield(process.exited)
            if self._stopping or self.llm.dead:
                return
            logger.error("API process %d %s; another takes its place", index, describe_exit(code))
            for service in self._services.values():
                service.on_process_end(index)
            aborted = 0
            error: str | None = ""
            joined, tries = self.llm.engine, 0
            while error is not None:  # repeated if the new process or the engine dies meanwhile
                aborted += await self._drop_requests(self._processes[index].name)
                if self._stopping or self.llm.dead:
                    return
                tries = tries + 1 if joined == self.llm.engine else 1
                if tries > TRIES:
                    raise StartError(f"API process {index} cannot be replaced: {error}")
                joined = self.llm.engine
                error = await self._restart(index)
                if error is not None:
                    logger.error("API process %d has not started: %s", index, error)
                    await asyncio.sleep(PAUSE)
            logger.info("API process %d serves again; %d requests of its predecessor were aborted", index, aborted)

    async def _restart(self, index: int) -> str | None:
        """Start an API process; returns the error if it cannot serve."""
        try:
            self._launch(index)
        except StartError as error:
            return str(error)
        return await self._processes[index].ready

    async def _drop_requests(self, name: str) -> int:
        """Have the engine drop the requests of a process that has ended; returns their number."""
        while self.llm.dead is None:
            try:
                return await self.llm.call("leave", front_end=name)
            except EngineDead:
                await self.llm.restored()
        return 0

    async def end(self) -> None:
        """Stop the processes and the engine, and close the sockets and the shared memory."""
        await asyncio.gather(*(process.stop(0.0) for process in self._processes.values()))
        await self.llm.shutdown()
        for service in self._services.values():
            await service.close()
        for listener in self._sockets[1:]:
            listener.close()
        os.close(self._counters)
