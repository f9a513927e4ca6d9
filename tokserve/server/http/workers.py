"""Threads for work that grows with a request, so that the event loop never does it.

Large work has separate threads, so that medium work does not wait for it.  `loop_monitor` reads the log of work.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import NamedTuple, TypeVar

from starlette.requests import Request

from tokserve.base.memory import give_back
from tokserve.server.http.disconnect import CancelOnDisconnect

T = TypeVar("T")
SMALL = 1 << 15  # work on fewer bytes is done in the event loop
LARGE = 1 << 20  # work on so many bytes uses the threads for large work
ITEM = 256  # bytes that a prompt or a choice counts as, besides its own: what is done for each of a list
TRIMMED = 1 << 16  # after work on so many bytes, free memory is returned to the system
RECENT = 64  # finished pieces of work in the log
TRIM_SECONDS = 1.0  # between the end of large work and the return of free memory to the system


class FinishedWork(NamedTuple):
    """A finished piece of work, with its times by `time.monotonic`."""

    route: str
    start: float
    end: float


class WorkLog:
    """The log of work in threads, by route and time.  Thread-safe."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, float]] = {}
        self._ended: deque[FinishedWork] = deque(maxlen=RECENT)
        self._count = 0

    def run(self, route: str, work: Callable[[], T]) -> T:
        self._count = key = self._count + 1
        start = time.monotonic()
        self._running[key] = route, start
        try:
            return work()
        finally:
            del self._running[key]
            self._ended.append(FinishedWork(route, start, time.monotonic()))

    def during(self, start: float, end: float) -> list[str]:
        running = [route for route, since in list(self._running.values()) if since < end]
        ended = [work.route for work in list(self._ended) if work.start < end and work.end > start]
        return list(dict.fromkeys(running + ended))

    def forget(self, end: float) -> None:
        """Drop the work that has finished by `end`.  One thread does this."""
        while self._ended and self._ended[0].end <= end:
            self._ended.popleft()


WORK_LOG = WorkLog()
_medium = ThreadPoolExecutor(2, "tokserve-work")
_large = ThreadPoolExecutor(2, "tokserve-large-work")
_trims: set[asyncio.TimerHandle] = set()


async def off_loop(request: Request, size: int, work: Callable[[], T]) -> T:
    """The result of `work` on `size` bytes of a request whose body has been read; done in a thread unless it is small.
    Raises `ClientDisconnected`."""
    if size < SMALL:
        return work()
    async with CancelOnDisconnect(request.receive):
        return await run(size, work)
    raise AssertionError("CancelOnDisconnect ends with a result or an exception")


async def run(size: int, work: Callable[[], T]) -> T:
    """The result of `work` on `size` bytes, done in a thread.  Cancelling drops work that has not begun."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    route, context = task.get_name() if task else "", copy_context()
    pool = _medium if size < LARGE else _large
    try:
        return await loop.run_in_executor(pool, lambda: context.run(WORK_LOG.run, route, work))
    finally:
        if size >= TRIMMED and not _trims:  # glibc keeps what large requests have used
            _trims.add(loop.call_later(TRIM_SECONDS, _trim))


def _trim() -> None:
    _trims.clear()
    in_background(give_back)


def in_background(work: Callable[[], object]) -> None:
    """Have a thread do what no request waits for; after `stop` it is dropped."""
    with suppress(RuntimeError):
        _medium.submit(work)


def stop() -> None:
    """Drop the work that has not begun, at the end of the process."""
    for pool in (_medium, _large):
        pool.shutdown(wait=False, cancel_futures=True)
