"""`tokserve serve`: serves HTTP in this process, or supervises several API processes.

The port is bound before the engine loads, so that a port in use is reported at once; the server listens when it can
serve requests.  A signal while the engine loads ends the start.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import uvloop

import tokserve
from tokserve.base import log, one_blas_thread  # noqa: F401
from tokserve.base.errors import StartError
from tokserve.base.rooms import part
from tokserve.cli import listen
from tokserve.cli.banner import log_ready
from tokserve.cli.http import ApiServer, Signals, report
from tokserve.client.async_llm import AsyncLLM
from tokserve.config import SECRET, WITHOUT_EFFECT, Config, option_values
from tokserve.config.resolve import model_name, resolve
from tokserve.config.vllm import own_options

logger = logging.getLogger("tokserve.serve")


class FrontEnd(Protocol):
    """What serves HTTP, in this process or in several."""

    llm: AsyncLLM

    async def start(self) -> None: ...

    async def serve(self, sock: socket.socket, signals: Signals) -> int: ...

    async def end(self) -> None: ...


def serve(values: dict[str, Any]) -> int:
    """Serve with these options until a signal; returns the exit code (1: the engine died).  Raises StartError."""
    options, without = own_options(values)
    return serve_config(Config.make(**options), without=without)


def serve_config(
    options: Config, make_server: Callable[[Config], ApiServer] = ApiServer, without: Sequence[str] = ()
) -> int:
    """`serve` with a configuration.  `make_server`: makes the only API process's server.  `without`: options that were
    given and have no effect."""
    started = time.monotonic()
    log.setup("server", options.logs.log_level, options.logs.log_format)
    for name in without:
        logger.warning(WITHOUT_EFFECT, name)
    try:
        config = resolve(options)
        if config.parallel.headless:
            _log_options(options, config)
            code: int = part("ranks", "hold")(config)
            return code
        with listen.bind(config) as sock:
            _log_options(options, config)
            return uvloop.run(_run(config, sock, started, make_server))
    except StartError as error:
        if options.logs.log_format == "text":
            raise
        logger.error("%s", error)  # a reader of JSON expects only JSON
        return 1


def chosen(config: Config) -> str:
    """The options that differ from their defaults, as `name=value`; of keys only their number."""
    words = []
    for (_, name, value), (_, _, default) in zip(option_values(config), option_values(Config()), strict=True):
        if value != default and value not in (None, []):
            value = model_name(config) if name == "model" else value
            words.append(f"{name}={f'({len(value)} set)' if name in SECRET else value}")
    return " ".join(words)


def _log_options(options: Config, config: Config) -> None:
    """Log the version and the options as they were given, and for debugging as they were resolved."""
    logger.info("tokserve %s: %s", tokserve.__version__, chosen(options))
    logger.debug("resolved: %s", chosen(config))


async def _run(config: Config, sock: socket.socket, started: float, make_server: Callable[[Config], ApiServer]) -> int:
    several = config.server.api_server_count > 1
    front: FrontEnd = part("fleet", "supervisor")(config, sock) if several else make_server(config)
    starting = asyncio.create_task(front.start())
    signals = Signals(starting.cancel)
    try:
        await asyncio.wait([starting])
        if starting.cancelled():
            logger.info("stopped by a signal while starting")
            return 0
        starting.result()
        listen.begin(sock, config)  # clients can connect now, and are served below
        log_ready(front.llm, config, listen.url(config, sock), time.monotonic() - started)
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
