"""Detects an engine that hangs: it is pinged at intervals, and the time without an answer is measured.

The engine answers between two steps, so silence means a step that does not end, or a stopped process; to the operating
system, its process looks healthy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MAX_INTERVAL = 15.0  # seconds between two pings


class Heartbeat:
    """`start` in a running loop; call `answered` with every answer.

    `ping` sends a ping.  `on_hung` is called at every beat that finds no answer for `timeout` seconds, if the beat
    before found the same: had this process itself been stopped that long, the first beat would only be late, and
    the answer would be read before the second.
    """

    def __init__(self, timeout: float, ping: Callable[[], object], on_hung: Callable[[], object]) -> None:
        self._timeout = timeout
        self._ping = ping
        self._on_hung = on_hung
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ping_sent: float | None = None  # when the unanswered ping was sent
        self._was_hung = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Ping now, and then at intervals; again for another engine."""
        self.stop()
        self._loop = asyncio.get_running_loop()
        self._beat()

    def stop(self) -> None:
        """Stop pinging; no answer is expected any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._ping_sent = None
        self._was_hung = False

    def answered(self) -> None:
        self._ping_sent = None
        self._was_hung = False

    @property
    def silence(self) -> float:
        """Seconds since the ping that has not been answered; 0.0 if there is none."""
        return 0.0 if self._ping_sent is None or self._loop is None else self._loop.time() - self._ping_sent

    @property
    def hung(self) -> bool:
        """Whether there has been no answer for longer than the timeout."""
        return self.silence > self._timeout

    def _beat(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(min(self._timeout / 4, MAX_INTERVAL), self._beat)
        if self._ping_sent is None:
            self._ping_sent = self._loop.time()
            self._ping()
        elif self.hung and self._was_hung:
            self._on_hung()
        else:
            self._was_hung = self.hung
