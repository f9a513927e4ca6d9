"""How many tokens a step may have while several clients are served, so that each finds steps that are short.

A request alone takes steps of one token.  Beside the prompts and the many rows of another client its steps take as long
as all their tokens do; here they are bounded to `MAX_SLOWDOWN` times the time of a small step, as measured.
"""

from __future__ import annotations

MAX_SLOWDOWN = 3.0
SMALL = 16  # tokens of a step that is small; no bound is lower
WEIGHT = 0.1  # of a new measurement in the moving average


class StepPace:
    """Seconds of a step by the number of its tokens: a moving average for each power of two and up to the next."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step has ended.  A time that is not above zero says nothing: the clock stood still, or drafts were drawn
        while an earlier step was waited for."""
        if seconds <= 0.0:
            return
        bucket = 1 << (num_tokens.bit_length() - 1)
        average = self._seconds.get(bucket, seconds)
        self._seconds[bucket] = average + (seconds - average) * WEIGHT

    def tokens_per_second(self) -> float:
        """The rate of the largest steps measured, of at least SMALL tokens; 0.0: none was."""
        bucket = max((bucket for bucket in self._seconds if bucket >= SMALL), default=0)
        return 1.5 * bucket / self._seconds[bucket] if bucket and self._seconds[bucket] else 0.0

    def max_tokens(self, limit: int) -> int:
        """The tokens, at most `limit`, that a step with several clients may have."""
        small = min((bucket for bucket in self._seconds if bucket <= SMALL), default=None)
        if small is None:
            return min(limit, SMALL) if any(self._seconds.values()) else limit
        bound = MAX_SLOWDOWN * self._seconds[small]
        if not bound:
            return limit
        tokens = max(bucket for bucket, seconds in self._seconds.items() if seconds <= bound)
        seconds = self._seconds[tokens]
        while tokens < limit:
            # twice the tokens take at most twice the time: so does a size that was never measured, or once while the
            # machine was busy, which would not be measured again otherwise
            larger = min(self._seconds.get(2 * tokens, 2 * seconds), 2 * seconds)
            if larger > bound:
                part = (bound - seconds) / (larger - seconds) if larger > seconds else 0.0
                return min(limit, max(SMALL, tokens + int(max(0.0, part) * tokens)))
            tokens, seconds = 2 * tokens, larger
        return limit
