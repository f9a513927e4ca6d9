"""Detects an output that repeats itself: one that ends in the same pattern of ids several times in a row.

For every size of pattern one number is kept: how many of the latest ids equal the id one pattern earlier.  `times`
patterns in a row are (times - 1) * size such ids, so a token costs a comparison per size, however long the output is.
"""

from __future__ import annotations

from array import array

from tokserve.params import RepetitionDetection


class Repetition:
    """One output's repetitions.  `wanted` is valid and not off."""

    def __init__(self, wanted: RepetitionDetection) -> None:
        first, last, again = max(1, wanted.min_pattern_size), wanted.max_pattern_size, wanted.min_count - 1
        self._sizes = [(size, size * again) for size in range(first, last + 1)]
        self._equal = [0] * len(self._sizes)

    def append(self, tokens: array[int], count: int) -> int:
        """The last of `tokens` is new, the last `count` are output: the smallest pattern it completes, or 0."""
        token = tokens[-1]
        found = 0
        for place, (size, needed) in enumerate(self._sizes):
            if size >= count:
                break
            equal = self._equal[place] = self._equal[place] + 1 if tokens[-1 - size] == token else 0
            if equal >= needed and not found:
                found = size
        return found
