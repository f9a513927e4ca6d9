"""Runs the HTTP server of one API process, with its line of statistics.

uvicorn and the routes are imported while the engine loads.  The first signal drains, the second aborts the requests
that still run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from tokserve.base.errors import RequestError, StartError
from tokserve.base.memory import LOOK, FullCollections, keep_apart
from tokserve.base.processes import wake_promptly
from tokserve.base.rooms import part
from tokserve.cli.listen import BACKLOG
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.outputs import StepStats, total
from tokserve.config import Config
from tokserve.server.api_process import ApiProcess

logger = logging.getLogger("tokserve.serve")
HANG_UP = (2.0, 0.5)  # seconds to send the last bytes of replies, after the first signal and after further ones
ABORT_SECONDS = 5.0  # limit for the engine to abort requests: it may hang
SWITCH = 1e-4  # seconds after which a thread with large work hands the interpreter's lock to the event loop
DEAD_GRACE = 5.0  # seconds of 503s after the engine's death, before the process exits


class Signals:
    """Calls `act` on SIGTERM, SIGINT and SIGHUP; `act` may be replaced.  A SIGHUP that is ignored when the process
    starts (`nohup`) stays ignored."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, lambda: self.act())


class ApiServer:
    """The HTTP server around an `AsyncLLM`.  Call `start`, `serve`, and in any case `end`."""

    def __init__(self, config: Config, api_process: ApiProcess | None = None) -> None:
        self.llm = AsyncLLM.from_config(config)
        self._config = config
        self._api_process = api_process
        self._http: Any = None

    async def start(self, joining: Coroutine[Any, Any, None] | None = None) -> None:
        """Start the engine, or await `joining`, while importing the HTTP server.  Raises StartError."""
        engine = asyncio.create_task(joining or self.llm.start())
        try:
            await asyncio.sleep(0)  # starts the engine's process
            importing = asyncio.to_thread(http_server, self.llm, self._config, self._api_process)
            self._http, _ = await asyncio.gather(importing, engine)
        finally:
            engine.cancel()

    async def serve(self, sock: socket.socket, signals: Signals) -> int:
        """Serve until a signal or the engine's death; returns the exit code."""
        server, app, tracing, loop_monitor, stop_workers = self._http
        sys.setswitchinterval(SWITCH)
        wake_promptly()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else each text is handed to another thread
        keep_apart()
        signals.act = _stopper(server, app, self.llm, self._config.server.shutdown_timeout)
        coroutines = (_watch(self.llm, server), loop_monitor.watch(), _collect_garbage())
        watching = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            await server.serve(sockets=[sock])
        finally:
            for task in watching:
                task.cancel()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
            stop_workers()
        return 1 if self.llm.dead else 0

    async def end(self) -> None:
        """Disconnect from the engine, and end it if this process has started it."""
        await self.llm.shutdown()


def http_server(llm: AsyncLLM, config: Config, api_process: ApiProcess | None) -> Any:
    """The uvicorn server, the app, the tracing (or None), the loop monitor, and the function that stops the threads."""
    import uvicorn

    from tokserve.server.app import build_app
    from tokserve.server.http import workers
    from tokserve.server.http.loop_monitor import LoopMonitor
    from tokserve.server.http.protocol import Protocol

    s, tls = config.server, config.tls
    tracing = _tracing(config) if config.logs.otlp_traces_endpoint else None
    app = build_app(llm, config, api_process=api_process, trace=tracing and tracing.observe)

    class Server(uvicorn.Server):
        """uvicorn's server without its signal handlers: ours drain first."""

        def capture_signals(self) -> Any:
            return nullcontext()

    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_keep_alive=s.keep_alive,
        root_path=s.root_path,
        ssl_keyfile=tls.ssl_keyfile,
        ssl_certfile=tls.ssl_certfile,
        ssl_ca_certs=tls.ssl_ca_certs,
        ssl_cert_reqs=2 if tls.ssl_ca_certs else 0,
        timeout_graceful_shutdown=5,
        backlog=BACKLOG,
        server_header=False,
        http=partial(Protocol, stall_timeout=s.stream_stall_timeout),  # type: ignore[arg-type]  # a factory
        ws="none",
    )
    try:
        settings.load()
    except OSError as error:  # ssl.SSLError is one
        raise StartError(f"ssl_certfile and ssl_keyfile cannot be used: {error.strerror or error}") from None
    return Server(settings), app, tracing, LoopMonitor(app.state.serving.observe_lag), workers.stop


def _tracing(config: Config) -> Any:
    """The tracing.  Raises StartError if its package is missing."""
    try:
        tracing = part("observe", "tracing")
    except ImportError:
        raise StartError("otlp_traces_endpoint needs OpenTelemetry: pip install 'tokserve[otel]'") from None
    names = config.server.served_model_name or [config.model.model]
    return tracing(names[0], config.logs.otlp_traces_endpoint or "")


def _stopper(server: Any, app: Any, llm: AsyncLLM, timeout: float) -> Callable[[], None]:
    """The signal handler while serving: drains, the next time aborts."""
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    async def drain(seconds: float, hang_up: float) -> None:
        app.state.draining = True
        logger.info(
            "stopping%s",
            f": requests in flight ({llm.num_inflight}) may still run for {seconds:g} s; another signal ends them now"
            if llm.num_inflight and seconds
            else "",
        )
        end = loop.time() + seconds
        while llm.num_inflight and loop.time() < end:
            await asyncio.sleep(0.05)
        if llm.num_inflight:
            logger.info("aborting %d running requests", llm.num_inflight)
            with suppress(TimeoutError, RequestError):  # the server stops in any case
                async with asyncio.timeout(ABORT_SECONDS):
                    await llm.abort_own("shutdown")
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


async def _collect_garbage() -> None:
    garbage = FullCollections()
    try:
        while True:
            await asyncio.sleep(LOOK)
            garbage.run_if_due()
    finally:
        garbage.stop()


async def _watch(llm: AsyncLLM, server: Any) -> None:
    while llm.dead is None:
        await asyncio.sleep(0.2)
    logger.error("the engine died: %s; answering 503 for %.0f s, then exiting", llm.dead.private, DEAD_GRACE)
    await asyncio.sleep(DEAD_GRACE)
    server.should_exit = True


async def report(llm: AsyncLLM, config: Config) -> None:
    """Log a line of statistics for every interval in which the engine ran steps."""
    interval = config.logs.log_stats_interval
    last = llm.reports
    while True:
        await asyncio.sleep(interval)
        now, before = llm.reports, last
        last = now
        # an engine that was replaced counts from zero
        since = total(
            [
                old.stats if old.stats.steps <= new.stats.steps else StepStats()
                for old, new in zip(before, now, strict=True)
            ]
        )
        stats = total([report.stats for report in now])
        if stats.steps != since.steps:
            hits = stats.prefix_hits - since.prefix_hits
            queries = max(1, stats.prefix_queries - since.prefix_queries)
            logger.info(
                "running %d, waiting %d, prompt %.0f tok/s, output %.0f tok/s, kv %.0f %%, prefix hits %.0f %%, "
                "preemptions %d",
                stats.running,
                stats.waiting,
                (stats.prompt_tokens - since.prompt_tokens) / interval,
                (stats.output_tokens - since.output_tokens) / interval,
                100 * stats.blocks_held / max(1, stats.blocks_total),
                100 * hits / queries,
                stats.preemptions,
            )
