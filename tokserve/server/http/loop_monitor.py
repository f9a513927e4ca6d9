"""Measures the lag of the event loop, and logs the route that has stalled it.

The loop records a heartbeat; a thread that misses it inspects what the loop is running.  A request's task is named
after its route (by `app`).  Work in threads is in the log of `workers`: it stalls the loop, too, when a library holds
the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from tokserve.server.http import workers

logger = logging.getLogger(__name__)
INTERVAL = 0.05  # seconds between two heartbeats
LOGGED = 0.25  # seconds from which a stall is logged
PACKAGE = "tokserve."


class LoopMonitor:
    """Call `watch` in the event loop.  `observe` receives the lag of each heartbeat in seconds."""

    def __init__(self, observe: Callable[[float], object], interval: float = INTERVAL) -> None:
        self._observe = observe
        self._interval = interval
        self._deadline = time.monotonic() + interval
        self._seen: str | None = None  # what the loop was running when the thread inspected it
        self._stopped = threading.Event()

    async def watch(self) -> None:
        """Measure for as long as this runs."""
        loop = asyncio.get_running_loop()
        self._deadline = time.monotonic() + self._interval
        thread = threading.Thread(target=self._inspect, args=(loop, threading.get_ident()), daemon=True)
        thread.start()
        try:
            while True:
                deadline = self._deadline
                await asyncio.sleep(self._interval)
                now = time.monotonic()
                late = max(0.0, now - deadline)
                self._observe(late)
                if late > LOGGED:
                    logger.warning("the event loop stalled for %.2f s: %s", late, self._cause(deadline, now))
                self._seen = None
                workers.WORK_LOG.forget(now)
                self._deadline = time.monotonic() + self._interval
        finally:
            self._stopped.set()

    def _cause(self, start: float, end: float) -> str:
        if self._seen is not None:
            return self._seen
        routes = workers.WORK_LOG.during(start, end)
        return f"a thread worked for {', '.join(routes)}" if routes else "no request of this process was at work"

    def _inspect(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        """Inspect the loop, in a thread, whenever its heartbeat is overdue."""
        while not self._stopped.wait(self._interval):
            if self._seen is None and time.monotonic() > self._deadline + LOGGED / 4:
                self._seen = _current_activity(loop, sys._current_frames().get(thread))


def _current_activity(loop: asyncio.AbstractEventLoop, frame: FrameType | None) -> str | None:
    """The name of the running task, or the function of this package that the loop runs; None: the loop waits."""
    function = None
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(PACKAGE):
            function = f"{name}.{frame.f_code.co_qualname}"
            break
        frame = frame.f_back
    task = asyncio.current_task(loop)
    if task is not None:
        return f"{task.get_name()} in {function}" if function else task.get_name()
    return None if function is None or function.startswith("tokserve.cli.") else function
