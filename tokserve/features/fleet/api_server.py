"""One of several API processes: `python -m tokserve.features.fleet.api_server`, a child of the supervisor.

Stdin is a socket to the supervisor with a JSON object per line.  It receives an `ApiProcessSetup`, and sends a
`StartReport` when it can serve or has failed.  Later it receives an `EngineLocation` for each engine that replaces
another, an empty one if none does.  The end of the stream means that the supervisor has exited.  The listening socket
and the shared counters are inherited.
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

from tokserve.base import log, one_blas_thread  # noqa: F401
from tokserve.base.errors import StartError
from tokserve.cli import listen
from tokserve.cli.http import ApiServer, Signals
from tokserve.client.async_llm import AsyncLLM
from tokserve.config import Config
from tokserve.server.api_process import ApiProcess

logger = logging.getLogger("tokserve.serve")
COMMAND = (sys.executable, "-P", "-m", "tokserve.features.fleet.api_server")
SUPERVISOR = 0  # descriptor of the socket to the supervisor
LINES = 1 << 16  # limit of bytes of one read


class ApiProcessSetup(msgspec.Struct, frozen=True):
    """How to start the process.  `name`: its name as a front end of the engine.  `listening`: a descriptor."""

    config: Config
    name: str
    address: str
    engine: int
    listening: int
    api_process: ApiProcess


class EngineLocation(msgspec.Struct, frozen=True):
    """The engine's address and process id; empty: it has ended and is not replaced."""

    address: str = ""
    pid: int = 0


class StartReport(msgspec.Struct, frozen=True):
    """The process can serve, or `error` says why not."""

    error: str | None = None


def main() -> None:
    line = read_setup()
    if not line:
        sys.exit("API processes are started by `tokserve serve --api-server-count N`, which talks to their stdin")
    setup = msgspec.json.decode(line, type=ApiProcessSetup)
    logs = setup.config.logs
    log.setup(f"api-{setup.api_process.index}", logs.log_level, logs.log_format)
    with socket.socket(fileno=setup.listening) as sock:
        sys.exit(uvloop.run(_run(setup, sock)))


def read_setup() -> bytes:
    """The supervisor's first line, and no byte of the next one; empty: there is no supervisor."""
    with open(SUPERVISOR, "rb", buffering=0, closefd=False) as channel:
        return channel.readline()


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
    with suppress(BrokenPipeError):  # the supervisor has exited; `_exit_now` follows
        os.write(SUPERVISOR, msgspec.json.encode(report) + b"\n")


def _listen(llm: AsyncLLM, config: Config) -> None:
    """Handle messages of the supervisor.  (Lines are short and rare: one read has whole lines.)"""
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
    """Exit at once: without the supervisor, no process would replace or stop this one."""
    logger.info("the supervisor has exited: exiting")
    listen.remove(config)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    main()
