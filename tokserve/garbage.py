"""Full collections of garbage, when they cost others least.

A full collection visits every object that Python keeps, and holds the interpreter's lock meanwhile: for a fifth of a
second beside a few large bodies, whose decoding makes so many objects that it starts one after the other.  Nearly
everything is freed by its reference count; what is left are the cycles of errors and tasks, and they can wait.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

NEVER = 1 << 30  # collections of the middle generation before Python begins a full one
SOON = 10.0  # seconds from one full collection to the next in a calm moment
LATEST = 600.0  # and at any moment
FEW = 300_000  # blocks of memory, besides those of the start, whose objects are visited in some 20 ms
AGAIN = 1.0  # seconds until the next look at how many there are, which takes up to a millisecond


class FullCollections:
    """From here on, this process' full collections are those of `run_if_due`.  Objects made so far are never visited:
    they live as long as the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._most = sys.getallocatedblocks() + FEW
        self._clock = clock
        self._last = clock()
        self._next_look = self._last + SOON

    def run_if_due(self, calm: bool) -> bool:
        """Run one if the last is long enough ago; whether it was.  `calm`: no request waits for it; it is put off all
        the same while there are many objects."""
        now = self._clock()
        if now < self._next_look or not (calm or now >= self._last + LATEST):
            return False
        if sys.getallocatedblocks() > self._most and now < self._last + LATEST:
            self._next_look = now + AGAIN
            return False
        gc.collect()
        self._last = self._clock()
        self._next_look = self._last + SOON
        return True
