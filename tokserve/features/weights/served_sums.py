"""The sums of the weights that serve: computed when they are first needed, kept until others serve.

They are computed in the background thread, while a commit may change weights where they are.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tokserve.features.weights.coordinates import Coordinates
from tokserve.models.decoder import Decoder
from tokserve.rl.sums import Sums

T = TypeVar("T")


class ServedSums:
    """`of` and `consistent` are for the background thread, the rest for that of the steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = 0  # odd while weights are being changed
        self._known: tuple[weakref.ref[Decoder], Sums] | None = None

    def known(self, model: Decoder) -> Sums | None:
        """The model's sums, if they need not be computed."""
        with self._lock:
            return self._known[1] if self._known is not None and self._known[0]() is model else None

    def of(self, model: Decoder, coordinates: Coordinates) -> Sums:

        def keep(sums: Sums) -> None:
            self._known = weakref.ref(model), sums

        known = self.known(model)
        return self.consistent(coordinates.sums, keep) if known is None else known

    def consistent(self, read: Callable[[], T], keep: Callable[[T], None] = lambda result: None) -> T:
        """`read()`, again if weights were changed meanwhile; no change comes between the last one and `keep`."""
        while True:
            changes = self._changes
            if changes % 2 == 0:
                result = read()
                with self._lock:
                    if changes == self._changes:
                        keep(result)
                        return result
            time.sleep(0.001)

    @contextmanager
    def changing(self, model: Decoder, sums: Sums) -> Iterator[None]:
        """Inside, the model's weights are changed where they are; its sums afterwards are `sums`."""
        with self._lock:
            self._changes += 1
            self._known = None
        try:
            yield
            with self._lock:
                self._known = weakref.ref(model), sums
        finally:
            with self._lock:
                self._changes += 1

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, weights may be replaced where they are; their sums are computed when they are needed."""
        with self._lock:
            self._changes += 1
            self._known = None
        try:
            yield
        finally:
            with self._lock:
                self._changes += 1

    def forget(self) -> None:
        """Code that is not ours may have changed weights."""
        with self._lock:
            self._changes += 2
            self._known = None
