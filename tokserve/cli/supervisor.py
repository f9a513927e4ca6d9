"""Several API processes at one address with one engine: started, kept alive, told to stop.

The supervisor owns the engine and the sockets and serves nothing itself.  An API process that dies is replaced, after
the engine has been told to drop its requests; when the engine is replaced, all are told where the new one is.  What
the processes must know of one another's requests, the engine knows; what they count together lies in shared memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from contextlib import suppress

import msgspec

from tokserve.cli import listen
from tokserve.cli.api_server import COMMAND, Engine, Opening, Report
from tokserve.cli.http import Signals
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.launch import ChildProcess, describe_exit
from tokserve.config import Config
from tokserve.errors import EngineDead, StartError
from tokserve.server.counters import Place, share

logger = logging.getLogger("tokserve.serve")
REPORT_SIZE = 1 << 16
TRIES = 3  # starts of an API process, with one engine, before it counts as one that cannot start
PAUSE = 1.0  # seconds between two of them: what the first one lacked, a descriptor say, may be there again


class ApiProcess(ChildProcess):
    """A started API process.  `ready`: None when it can serve, or why it cannot."""

    def __init__(self, opening: Opening) -> None:
        self.name = opening.name
        self.ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._channel, theirs = socket.socketpair()
        descriptors = {opening.listening, opening.place.counters}
        with theirs:
            super().__init__(COMMAND, theirs.fileno(), [fd for fd in descriptors if fd is not None])
        with suppress(BrokenPipeError):  # if it is dead already, `exited` will tell
            self._channel.sendall(msgspec.json.encode(opening) + b"\n")
        asyncio.get_running_loop().add_reader(self._channel, self._on_report)
        self.exited.add_done_callback(self._on_end)

    def tell(self, engine: Engine) -> None:
        """The engine has changed."""
        with suppress(OSError):  # it has ended
            self._channel.sendall(msgspec.json.encode(engine) + b"\n")

    def _on_report(self) -> None:
        line = b""
        with suppress(ConnectionError):
            line = self._channel.recv(REPORT_SIZE)
        if line:
            self._settle(msgspec.json.decode(line, type=Report).error)
        else:
            asyncio.get_running_loop().remove_reader(self._channel)

    def _on_end(self, exited: asyncio.Future[int]) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        self._settle(describe_exit(exited.result(), "an API process"))

    def _settle(self, error: str | None) -> None:
        if not self.ready.done():
            self.ready.set_result(error)


class Supervisor:
    """`start`, then `serve`; `end` whatever happens.  `llm` is the engine's owner and sends no requests."""

    def __init__(self, config: Config, sock: socket.socket) -> None:
        self.llm = AsyncLLM.from_config(config, text=False)
        self.llm.on_replaced(self._on_replaced)
        self._config = config
        self._count = config.server.api_server_count
        self._sockets = listen.spread(sock, self._count)
        self._counters = share(self._count)
        self._created = int(time.time())
        self._processes: dict[int, ApiProcess] = {}
        self._num_started = 0
        self._stopping = False

    async def start(self) -> None:
        """The engine, and beside it the API processes; until all can serve.  Raises StartError."""
        tasks = [asyncio.create_task(self.llm.start())]
        try:
            await asyncio.sleep(0)  # the engine's process is there, or it has failed
            if tasks[0].done():
                tasks[0].result()
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
        for each in self._sockets:
            listen.begin(each, self._config)

    def _launch(self, index: int) -> None:
        address, pid = self.llm.engine
        self._num_started += 1
        name = f"api-{index}-{self._num_started}"
        place = Place(index, self._created, self._counters)
        opening = Opening(self._config, name, address, pid, self._sockets[index].fileno(), place)
        try:
            self._processes[index] = ApiProcess(opening)
        except OSError as error:  # no descriptor or no process is left
            raise StartError(f"API process {index} could not be started: {error.strerror}") from None

    async def _all_ready(self) -> None:
        for process in self._processes.values():
            error = await process.ready
            if error is not None:
                raise StartError(error)

    async def serve(self, sock: socket.socket, signals: Signals) -> int:
        """Until told to stop, or the engine dies; returns the exit code."""
        signals.act = self._stop
        keeping = [asyncio.create_task(self._keep(index)) for index in range(self._count)]
        done, others = await asyncio.wait(keeping, return_when="FIRST_EXCEPTION")
        for task in others:
            task.cancel()
        for task in done:
            task.result()
        return 1 if self.llm.dead else 0

    def _on_replaced(self) -> None:
        engine = Engine() if self.llm.dead else Engine(*self.llm.engine)
        for process in self._processes.values():
            process.tell(engine)

    def _stop(self) -> None:
        """The first time all processes drain, the second they abort what still runs."""
        logger.info("stopping: the API processes %s", "hang up" if self._stopping else "drain")
        self._stopping = True
        for each in self._sockets:  # a process that ends shall leave no connections waiting at its socket
            each.close()
        for process in self._processes.values():
            process.signal(signal.SIGTERM)

    async def _keep(self, index: int) -> None:
        """One API process after the other, until there need be none.  Raises StartError if one cannot be replaced."""
        while True:
            process = self._processes[index]
            code = await asyncio.shield(process.exited)
            if self._stopping or self.llm.dead:
                return
            logger.error("%s; another takes its place", describe_exit(code, f"API process {index}"))
            aborted = 0
            error: str | None = ""
            joined, tries = self.llm.engine, 0
            while error is not None:  # again if it, or the engine, went meanwhile
                aborted += await self._drop(self._processes[index].name)
                if self._stopping or self.llm.dead:
                    return
                tries = tries + 1 if joined == self.llm.engine else 1
                if tries > TRIES:
                    raise StartError(f"API process {index} cannot be replaced: {error}")
                joined = self.llm.engine
                error = await self._started(index)
                if error is not None:
                    logger.error("API process %d has not started: %s", index, error)
                    await asyncio.sleep(PAUSE)
            logger.info("API process %d serves again; %d requests of its predecessor were aborted", index, aborted)

    async def _started(self, index: int) -> str | None:
        """Start an API process; why it cannot serve, if so."""
        try:
            self._launch(index)
        except StartError as error:
            return str(error)
        return await self._processes[index].ready

    async def _drop(self, name: str) -> int:
        """Have the engine drop the requests of a process that has ended, and say how many those were."""
        while self.llm.dead is None:
            try:
                dropped: int = await self.llm.call("leave", front_end=name)
                return dropped
            except EngineDead:
                await self.llm.restored()
        return 0

    async def end(self) -> None:
        """Nothing is left behind."""
        await asyncio.gather(*(process.stop(0.0) for process in self._processes.values()))
        await self.llm.shutdown()
        for each in self._sockets[1:]:
            each.close()
        os.close(self._counters)
