"""One of several API processes: `python -m tokserve.cli.api_server`, started by the supervisor and ending with it.

Stdin is a socket to the supervisor, with a JSON object per line: first comes the `ApiProcessSetup`, and a `StartReport` goes back
when this process can serve or knows that it cannot.  Later, an `EngineLocation` comes for every engine that replaces another,
an empty one if none does.  The end of the stream means that the supervisor is gone.  The listening socket and the
shared counters are inherited.  Must not know the other API processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import suppress

import msgspec
import uvloop

from tokserve import log
from tokserve.cli import listen
from tokserve.cli.http import ApiServer, Signals
from tokserve.client.async_llm import AsyncLLM
from tokserve.config import Config
from tokserve.errors import StartError
from tokserve.server.counters import ApiProcess

logger = logging.getLogger("tokserve.serve")
COMMAND = (sys.executable, "-m", "tokserve.cli.api_server")
SUPERVISOR = 0  # the descriptor
LINES = 1 << 16  # bytes read at once


class ApiProcessSetup(msgspec.Struct, frozen=True):
    """What the process needs to know.  `name`: under which the engine knows it.  `listening`: a descriptor."""

    config: Config
    name: str
    address: str
    engine: int
    listening: int
    api_process: ApiProcess


class EngineLocation(msgspec.Struct, frozen=True):
    """The engine's address and process; empty: it has ended and is not replaced."""

    address: str = ""
    pid: int = 0


class StartReport(msgspec.Struct, frozen=True):
    """The process can serve, unless there is an error."""

    error: str | None = None


def main() -> None:
    """The process."""
    with open(SUPERVISOR, "rb", closefd=False) as channel:
        line = channel.readline()
    if not line:
        sys.exit("API processes are started by `tokserve serve --api-server-count N`, which talks to their stdin")
    setup = msgspec.json.decode(line, type=ApiProcessSetup)
    server = setup.config.server
    log.setup(f"api-{setup.api_process.index}", server.log_level, server.log_format)
    with socket.socket(fileno=setup.listening) as sock:
        sys.exit(uvloop.run(_run(setup, sock)))


async def _run(setup: ApiProcessSetup, sock: socket.socket) -> int:
    server = ApiServer(setup.config, setup.api_process)
    asyncio.get_running_loop().add_reader(SUPERVISOR, _listen, server.llm, setup.config)
    joining = server.llm.connect(setup.address, pid=setup.engine, name=setup.name)
    starting = asyncio.create_task(server.start(joining))
    signals = Signals(starting.cancel)
    try:
        await asyncio.wait([starting])
        if starting.cancelled():
            return 0
        starting.result()
        _send(StartReport())
        return await server.serve(sock, signals)
    except StartError as error:
        _send(StartReport(str(error)))
        return 1
    finally:
        await server.end()


def _send(report: StartReport) -> None:
    with suppress(BrokenPipeError):  # it is gone; `_exit_now` is next
        os.write(SUPERVISOR, msgspec.json.encode(report) + b"\n")


def _listen(llm: AsyncLLM, config: Config) -> None:
    """Handle what the supervisor sends.  (Lines are short and rare: each is read whole.)"""
    lines = b""
    with suppress(ConnectionError):
        lines = os.read(SUPERVISOR, LINES)
    if not lines:
        _exit_now(config)
    for line in lines.splitlines():
        engine = msgspec.json.decode(line, type=EngineLocation)
        if engine.pid:
            llm.rejoin(engine.address, engine.pid)
        else:
            llm.give_up()


def _exit_now(config: Config) -> None:
    """End at once: without the supervisor, nobody would look after this process."""
    logger.info("the supervisor is gone: leaving")
    listen.remove(config)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    main()
