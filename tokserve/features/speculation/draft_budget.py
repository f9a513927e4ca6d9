"""How many drafts a step gets: as many as make the most tokens per second, by what steps of that size have taken.

Costs are measured while serving, by rows and tokens of a step, so that sampling and attention count as they are; before
a size was measured, it is guessed from the others.  Results do not depend on any of this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_KNOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_RATE = 0.15  # of a new measurement in the moving average
_FADE = 0.01  # by which a size that was not measured in a step comes back to the guess
_MAX_RATIO = 4.0  # a step that took longer than so many times what was expected was held up by something else
MIN_GAIN = 1.02  # of tokens per second; below that, drafts are not worth their bookkeeping


def guess(num_tokens: float) -> float:
    """The time of a step of so many tokens in steps of one token: weights are read once, products then cost."""
    return 1.0 + 0.01 * (num_tokens - 1) + 0.03 * max(0.0, num_tokens - 16)


def _knot(count: int) -> int:
    """The index of the first knot that is not below."""
    return min(bisect_left(_KNOTS, count), len(_KNOTS) - 1)


class StepCosts:
    """Seconds of a step by rows and tokens: a moving average at each knot, interpolated between."""

    def __init__(self) -> None:
        self._ratios: dict[int, list[float]] = {}  # by the rows' knot: measured in guesses, for each knot of tokens
        self._scales: dict[int, float] = {}  # by the rows' knot: seconds of a guess

    def record(self, rows: int, num_tokens: int, seconds: float) -> None:
        """A step in which every token was sampled from has ended."""
        if seconds <= 0.0:  # a clock that stands still
            return
        knot = _knot(rows)
        scale = self._scales.get(knot)
        if scale is None:
            self._scales[knot] = seconds / guess(num_tokens)
            self._ratios[knot] = [1.0] * len(_KNOTS)
            return
        ratios = self._ratios[knot]
        at = _nearest(num_tokens)
        ratio = min(seconds / (guess(num_tokens) * scale), _MAX_RATIO * ratios[at])
        if num_tokens == rows:  # what all others are compared with
            self._scales[knot] = scale * (1 + (ratio - 1) * _RATE)
            return
        for index, value in enumerate(ratios):
            ratios[index] = value + ((ratio - value) * _RATE if index == at else (1.0 - value) * _FADE)

    def seconds(self, rows: int) -> float | None:
        """What a step with so many rows and a token each takes; None: not measured yet."""
        scale = self._scales.get(_knot(rows))
        return None if scale is None else scale * guess(rows)

    def relative(self, rows: int, num_tokens: int) -> float:
        """What a step of so many tokens takes, in steps with the same rows and a token each."""
        base = guess(rows)
        ratios = self._ratios.get(_knot(rows))
        if ratios is None or num_tokens <= rows:
            return guess(num_tokens) / base
        upper = _knot(num_tokens)
        if upper == 0 or num_tokens >= _KNOTS[-1]:
            return guess(num_tokens) * ratios[upper] / base
        low, high = _KNOTS[upper - 1], _KNOTS[upper]
        part = (num_tokens - low) / (high - low)
        below = 1.0 if low <= rows else ratios[upper - 1]
        return guess(num_tokens) * (below + (ratios[upper] - below) * part) / base


def _nearest(count: int) -> int:
    upper = _knot(count)
    if upper == 0 or _KNOTS[upper] - count <= count - _KNOTS[upper - 1]:
        return upper
    return upper - 1


def choose(likely: Sequence[Sequence[float]], rows: int, num_tokens: int, budget: int, costs: StepCosts) -> list[int]:
    """How many drafts each of several requests gets, `budget` together at most.

    `likely`: for each request, the probability of each of its drafts and all before it, so descending.  `rows` and
    `num_tokens`: of the step without drafts.
    """
    order = sorted(((p, index) for index, line in enumerate(likely) for p in line), key=lambda entry: -entry[0])
    expected, best, best_count = float(rows), 1.0, 0
    base = costs.relative(rows, num_tokens)
    for count, (probability, _) in enumerate(order[:budget], 1):
        expected += probability
        rate = expected / rows / (costs.relative(rows, num_tokens + count) / base)
        if rate > best * (MIN_GAIN if best_count == 0 else 1.0):
            best, best_count = rate, count
    counts = [0] * len(likely)
    for _, index in order[:best_count]:
        counts[index] += 1
    return counts
