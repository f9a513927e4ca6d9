"""An engine, and a server, in threads of the test's process, for tests that look only at what these answer.

A process of either imports everything anew, torch above all: a second of processor time each.  What surrounds the
processes (signals, their ends, logs, descriptors) is asked of `tests.e2e.server.Server` and of `LLM` as it is.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from unittest import mock

import uvloop

from tests.e2e.server import START_SECONDS, Served
from tokserve.base.curve import ClientKeys
from tokserve.cli import listen
from tokserve.cli.http import http_server
from tokserve.cli.main import parser
from tokserve.client import engine_client
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.launch import SOCKET
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.config.vllm import own_options
from tokserve.engine import process
from tokserve.executor.base import make

OF_THE_COMMAND = {"command", "config", "parser", "same_model"}


class EngineThread:
    """The life of an engine process in a thread; an `EngineHandle`."""

    keys: ClientKeys | None = None  # it is on this machine
    pid = os.getpid()

    def __init__(self, config: Config, name: str, environment: Mapping[str, str] | None = None) -> None:
        self._directory = tempfile.mkdtemp(prefix="tokserve-")
        self.address = f"ipc://{self._directory}/{SOCKET}"
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(config,), name=name, daemon=True)
        self._thread.start()

    def _run(self, config: Config) -> None:
        code = process.run(self.address, config, make(config))
        self._loop.call_soon_threadsafe(self.exited.set_result, code)

    async def located(self) -> str:
        """The address."""
        return self.address

    def describe_end(self) -> str:
        """Describe in words how it has ended."""
        return f"the engine thread has ended with {self.exited.result()}"

    def signal(self, number: int) -> None:
        """Refuse: a signal would be the test's."""
        raise AssertionError(f"signal {number} to an engine in the test's process")

    async def stop(self, patience: float) -> int:
        """Wait `patience` seconds for an end that was asked for: nothing else can end a thread."""
        code = await asyncio.wait_for(asyncio.shield(self.exited), max(patience, 5.0))
        self._thread.join()
        shutil.rmtree(self._directory)
        return code


@contextmanager
def engine_threads() -> Iterator[None]:
    """`LLM` and `AsyncLLM` of this process start their engines as threads."""
    with mock.patch.object(engine_client, "start_engine", EngineThread):
        yield


class ServerThread(Served):
    """`Server` with the same command line, in two threads: one of HTTP and one of the engine."""

    def __init__(self, model: str | Path, *flags: str) -> None:
        values = vars(parser().parse_args(["serve", str(model), "--port", "0", *flags]))
        words = {name: value for name, value in values.items() if name not in OF_THE_COMMAND}
        self._config = resolve(Config.make(**own_options(words)[0]))
        self._url: Future[str] = Future()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def url(self) -> str:
        return self._url.result(START_SECONDS)

    def __enter__(self) -> Self:
        with engine_threads():
            self._thread.start()
            _ = self.url
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve(self._config))
        except BaseException as error:
            if self._url.done():
                raise
            self._url.set_exception(error)

    async def _serve(self, config: Config) -> None:
        with listen.bind(config) as sock:
            async with AsyncLLM.from_config(config) as llm:
                http, *_ = http_server(llm, config, None)
                listen.begin(sock, config)
                self._url.set_result(listen.url(config, sock))
                serving = asyncio.create_task(http.serve(sockets=[sock]))
                await asyncio.to_thread(self._ending.wait)
                http.should_exit = True
                await serving
