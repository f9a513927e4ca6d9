"""One of several API processes: `python -m tokserve.cli.api_server`, started by the supervisor and ending with it.

Stdin is a socket to the supervisor, with a JSON object per line: first comes the `Opening`, and a `Report` goes back
when this process can serve or knows that it cannot.  Later, an `Engine` comes for every engine that replaces another,
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
from tokserve.server.counters import Place

logger = logging.getLogger("tokserve.serve")
COMMAND = (sys.executable, "-m", "tokserve.cli.api_server")
SUPERVISOR = 0  # the descriptor
LINES = 1 << 16  # bytes read at once


class Opening(msgspec.Struct, frozen=True):
    """What the process needs to know.  `name`: under which the engine knows it.  `listening`: a descriptor."""

    config: Config
    name: str
    address: str
    engine: int
    listening: int
    place: Place


class Engine(msgspec.Struct, frozen=True):
    """The engine's address and process; empty: it has ended and is not replaced."""

    address: str = ""
    pid: int = 0


class Report(msgspec.Struct, frozen=True):
    """The process can serve, unless there is an error."""

    error: str | None = None


def main() -> None:
    """The process."""
    with open(SUPERVISOR, "rb", closefd=False) as channel:
        line = channel.readline()
    if not line:
        sys.exit("API processes are started by `tokserve serve --api-server-count N`, which talks to their stdin")
    opening = msgspec.json.decode(line, type=Opening)
    server = opening.config.server
    log.setup(f"api-{opening.place.index}", server.log_level, server.log_format)
    with socket.socket(fileno=opening.listening) as sock:
        sys.exit(uvloop.run(_run(opening, sock)))


async def _run(opening: Opening, sock: socket.socket) -> int:
    server = ApiServer(opening.config, opening.place)
    asyncio.get_running_loop().add_reader(SUPERVISOR, _listen, server.llm, opening.config)
    joining = server.llm.connect(opening.address, pid=opening.engine, name=opening.name)
    starting = asyncio.create_task(server.start(joining))
    signals = Signals(starting.cancel)
    try:
        await asyncio.wait([starting])
        if starting.cancelled():
            return 0
        starting.result()
        _tell(Report())
        return await server.serve(sock, signals)
    except StartError as error:
        _tell(Report(str(error)))
        return 1
    finally:
        await server.end()


def _tell(report: Report) -> None:
    with suppress(BrokenPipeError):  # it is gone; `_leave` is next
        os.write(SUPERVISOR, msgspec.json.encode(report) + b"\n")


def _listen(llm: AsyncLLM, config: Config) -> None:
    """Handle what the supervisor sends.  (Lines are short and rare: each is read whole.)"""
    lines = b""
    with suppress(ConnectionError):
        lines = os.read(SUPERVISOR, LINES)
    if not lines:
        _leave(config)
    for line in lines.splitlines():
        engine = msgspec.json.decode(line, type=Engine)
        if engine.pid:
            llm.rejoin(engine.address, engine.pid)
        else:
            llm.give_up()


def _leave(config: Config) -> None:
    """End at once: without the supervisor, nobody would look after this process."""
    logger.info("the supervisor is gone: leaving")
    listen.remove(config)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    main()
