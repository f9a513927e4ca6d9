"""`tokserve serve`: starts the engine, then the HTTP server, and ends both in order.

The port is taken before the engine loads (a port in use is told at once) but listened on only when
requests can be served.  The first SIGTERM or SIGINT drains, the second aborts what still runs; while the engine
loads, there is nothing to drain.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tokserve import log
from tokserve.client.async_llm import AsyncLLM
from tokserve.config import Config, resolve
from tokserve.errors import StartError

logger = logging.getLogger("tokserve.serve")
BACKLOG = 4096  # connections not yet accepted
HANG_UP = (2.0, 0.5)  # seconds for the last bytes of replies after the first, a further signal
DEAD_GRACE = 5.0  # seconds that 503s are answered after the engine's death, before the process exits


def serve(values: dict[str, Any]) -> int:
    """Serve until told to stop; returns the exit code (1: the engine died)."""
    started = time.monotonic()
    config = resolve(Config.make(**values))
    log.setup("server", config.server.log_level)
    for group in ("model", "cache", "scheduler", "runtime", "server"):
        logger.info("%s: %s", group, _shown(getattr(config, group)))
    with _bind(config) as sock:
        return asyncio.run(_run(config, sock, started))


class _Signals:
    """What SIGTERM and SIGINT do: at first end the start-up, later whatever `act` is set to."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: self.act())


def _shown(group: Any) -> str:
    fields = msgspec.structs.asdict(group)
    if fields.get("api_key"):
        fields["api_key"] = f"({len(fields['api_key'])} set)"
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


def _bind(config: Config) -> socket.socket:
    server = config.server
    if server.uds:
        family, where = socket.AF_UNIX, server.uds
        address: str | tuple[str, int] = where
    else:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        address, where = (server.host, server.port), f"{server.host}:{server.port}"
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if server.uds:
            _remove_stale(server.uds)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: tokens leave at once
        sock.bind(address)
        if server.uds:
            os.chmod(server.uds, 0o600)
    except OSError as error:
        sock.close()
        raise StartError(f"cannot listen on {where}: {error.strerror}") from None
    return sock


def _remove_stale(path: str) -> None:
    """Unlink a socket file that nobody listens on; one in use is left, and bind will say so."""
    if not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return


async def _run(config: Config, sock: socket.socket, started: float) -> int:
    llm = AsyncLLM.from_config(config)
    starting = asyncio.create_task(_start(llm, config))
    signals = _Signals(starting.cancel)
    try:
        await asyncio.wait([starting])
        if starting.cancelled():
            logger.info("told to stop while starting")
            return 0
        server, app = starting.result()
        sock.listen(BACKLOG)  # from here on clients connect; uvicorn takes over in a moment
        url = _url(config, sock)
        _banner(llm, url, time.monotonic() - started)
        signals.act = _stopper(server, app, llm, config.server.shutdown_timeout)
        watching = [asyncio.create_task(_watch(llm, server)), asyncio.create_task(_report(llm, config))]
        await server.serve(sockets=[sock])
        for task in watching:
            task.cancel()
        return 1 if llm.dead else 0
    finally:
        starting.cancel()
        await llm.shutdown()
        if config.server.uds and os.path.exists(config.server.uds):
            os.unlink(config.server.uds)
        logger.info("stopped")


async def _start(llm: AsyncLLM, config: Config) -> Any:
    """The HTTP side is imported while the engine loads."""
    engine = asyncio.create_task(llm.start())
    try:
        await asyncio.sleep(0)  # the engine's process is there
        http = await asyncio.to_thread(_http_server, llm, config)
        await engine
        return http
    finally:
        engine.cancel()


def _http_server(llm: AsyncLLM, config: Config) -> Any:
    """The uvicorn server and the app's drain switch; imported while the engine loads."""
    import uvicorn

    from tokserve.server.app import build_app
    from tokserve.server.protocol import Protocol

    app = build_app(llm, config)
    s = config.server

    class Server(uvicorn.Server):
        """uvicorn without its signal handlers: ours drain first."""

        def install_signal_handlers(self) -> None:
            return

        def capture_signals(self) -> Any:
            from contextlib import nullcontext

            return nullcontext()

    settings = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_keep_alive=s.keep_alive, root_path=s.root_path,
        ssl_keyfile=s.ssl_keyfile, ssl_certfile=s.ssl_certfile, ssl_ca_certs=s.ssl_ca_certs,
        ssl_cert_reqs=2 if s.ssl_ca_certs else 0, timeout_graceful_shutdown=5, backlog=BACKLOG, server_header=False,
        http=Protocol, ws="none",
    )  # fmt: skip
    try:
        settings.load()
    except OSError as error:  # what ssl raises is one
        raise StartError(f"ssl_certfile and ssl_keyfile cannot be used: {error.strerror or error}") from None
    return Server(settings), app


def _url(config: Config, sock: socket.socket) -> str:
    if config.server.uds:
        return f"unix:{config.server.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if config.server.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _banner(llm: AsyncLLM, url: str, seconds: float) -> None:
    ready = llm.ready
    for name, value in ready.facts.items():
        logger.info(
            "%s: %s", name, " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
    tokens = ready.num_blocks * ready.block_size
    logger.info("kv cache: %d tokens (%d blocks of %d), max_model_len %d", tokens, ready.num_blocks, ready.block_size,
                ready.max_model_len)  # fmt: skip
    logger.info("serving on %s, ready after %.1f s", url, seconds)


def _stopper(server: Any, app: Any, llm: AsyncLLM, timeout: float) -> Callable[[], None]:
    """What a signal does from now on."""
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    async def drain(seconds: float, hang_up: float) -> None:
        app.state.draining = True
        logger.info("stopping: up to %.0f s for running requests", seconds)
        end = loop.time() + seconds
        while llm.num_inflight and loop.time() < end and llm.dead is None:
            await asyncio.sleep(0.05)
        if llm.num_inflight and llm.dead is None:
            logger.info("aborting %d running requests", llm.num_inflight)
            await llm.abort_all("shutdown")
        server.should_exit = True
        await asyncio.sleep(hang_up)
        for connection in list(server.server_state.connections):  # clients that do not read
            connection.transport.abort()

    def on_signal() -> None:
        again = bool(stopping)
        if again:
            stopping[0].cancel()
        stopping.insert(0, asyncio.ensure_future(drain(0.0 if again else timeout, HANG_UP[again])))

    return on_signal


async def _watch(llm: AsyncLLM, server: Any) -> None:
    while llm.dead is None:
        await asyncio.sleep(0.2)
    logger.error("the engine died: %s; answering 503 for %.0f s, then exiting", llm.dead.private, DEAD_GRACE)
    await asyncio.sleep(DEAD_GRACE)
    server.should_exit = True


async def _report(llm: AsyncLLM, config: Config) -> None:
    """One line per interval in which tokens were computed."""
    interval = config.server.log_stats_interval
    last = llm.stats
    while True:
        await asyncio.sleep(interval)
        now = llm.stats
        if now.steps != last.steps:
            hits = now.prefix_hits - last.prefix_hits
            queries = max(1, now.prefix_queries - last.prefix_queries)
            logger.info(
                "running %d, waiting %d, prompt %.0f tok/s, output %.0f tok/s, kv %.0f %%, prefix hits %.0f %%, "
                "preemptions %d",
                now.running, now.waiting, (now.prompt_tokens - last.prompt_tokens) / interval,
                (now.output_tokens - last.output_tokens) / interval, 100 * now.blocks_held / max(1, now.blocks_total),
                100 * hits / queries, now.preemptions,
            )  # fmt: skip
        last = now
