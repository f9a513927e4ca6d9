"""How long an open weight update or a pause may go without a sign of its holder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokserve.base.errors import RequestError

LONGEST = 1e9  # seconds


class Lease:
    """Expires when it was not extended for `seconds` and no call of its holder is in progress; 0 seconds: never."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._opened = self._extended = clock()
        self._calls = 0

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._opened

    @property
    def silence(self) -> float:
        """Seconds since it was extended; 0 while a call of its holder is in progress."""
        return 0.0 if self._calls else self._clock() - self._extended

    @property
    def in_use(self) -> bool:
        """Whether a call of its holder is in progress."""
        return self._calls > 0

    def extend(self) -> None:
        """Its holder was heard of."""
        self._extended = self._clock()

    @contextmanager
    def used(self) -> Iterator[None]:
        """A call of its holder, from its begin to its end."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self.extend()

    @property
    def seconds_left(self) -> float | None:
        """Until it expires; None: it will not as things are."""
        return max(0.0, self.seconds - self.silence) if self.seconds and not self._calls else None


def check_lease(seconds: float | None) -> None:
    """Raise RequestError for what is no length of a lease; None stands for the default."""
    if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= LONGEST):
        raise RequestError(
            f"lease must be from 0 (never expires) to {LONGEST:g} seconds, got {seconds:g}", field="lease"
        )
