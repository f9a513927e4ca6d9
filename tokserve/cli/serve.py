"""`tokserve serve`, from start to end: this process serves HTTP itself, or supervises several that do.

The port is bound before the engine loads, so that a port in use is reported at once, but listened on only when
requests can be served.  A signal while the engine loads ends the start.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import msgspec
import uvloop

from tokserve import log
from tokserve.cli import listen
from tokserve.cli.http import ApiServer, Signals, banner, report
from tokserve.cli.supervisor import Supervisor
from tokserve.config import Config
from tokserve.resolve import resolve

logger = logging.getLogger("tokserve.serve")


def serve(values: dict[str, Any]) -> int:
    """Serve until a signal; returns the exit code (1: the engine died).  Raises StartError."""
    started = time.monotonic()
    config = resolve(Config.make(**values))
    log.setup("server", config.server.log_level, config.server.log_format)
    for group in config.__struct_fields__:
        logger.info("%s: %s", group, _shown(getattr(config, group)))
    with listen.bind(config) as sock:
        return uvloop.run(_run(config, sock, started))


def _shown(group: Any) -> str:
    fields = msgspec.structs.asdict(group)
    for name in ("api_key", "admin_api_key"):
        if fields.get(name):
            fields[name] = f"({len(fields[name])} set)"
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


async def _run(config: Config, sock: socket.socket, started: float) -> int:
    front = ApiServer(config) if config.server.api_server_count == 1 else Supervisor(config, sock)
    starting = asyncio.create_task(front.start())
    signals = Signals(starting.cancel)
    try:
        await asyncio.wait([starting])
        if starting.cancelled():
            logger.info("stopped by a signal while starting")
            return 0
        starting.result()
        listen.begin(sock, config)  # clients can connect; they are served in a moment
        banner(front.llm, listen.url(config, sock), time.monotonic() - started)
        reporting = asyncio.create_task(report(front.llm, config))
        try:
            return await front.serve(sock, signals)
        finally:
            reporting.cancel()
    finally:
        starting.cancel()
        await front.end()
        listen.remove(config)
        logger.info("stopped")
