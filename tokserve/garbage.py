"""Full collections of garbage, when they cost others least.

A full collection visits every object that Python keeps, and holds the interpreter's lock meanwhile: for a fifth of a
second beside a few large bodies, whose decoding makes so many objects that it starts one after the other.  Nearly
everything is freed by its reference count; what is left are the cycles of errors and tasks, and they can wait.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

NEVER = 1 << 30  # collections of the middle generation before Python begins a full one
SOON = 10.0  # seconds from one full collection to the next in a calm moment
LATEST = 120.0  # and at any moment


class FullCollections:
    """From here on, this process' full collections are those of `run_if_due`.  Objects made so far are never visited:
    they live as long as the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._clock = clock
        self._last = clock()

    def run_if_due(self, calm: bool) -> None:
        """Run one if the last is long enough ago.  `calm`: few objects are there, or no request waits for it."""
        now = self._clock()
        if now - self._last >= (SOON if calm else LATEST):
            gc.collect()
            self._last = self._clock()
