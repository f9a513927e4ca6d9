"""Numbers that several API processes count together: each adds to a row of its own, and any can sum the rows.

The table is in memory that the processes share, so the sums are exact at any time, need no messages, and outlive a
process: its successor goes on counting in the same row.  Must not know what is counted.
"""

from __future__ import annotations

import mmap
import os

import msgspec

CELLS = 1024  # float64 in a row: more than there are metrics


class Place(msgspec.Struct, frozen=True):
    """Which of the server's API processes this is (`index`), and what they all share.

    `created`: when the server started, in seconds of Unix time.  `counters`: the descriptor of the shared table.
    """

    index: int
    created: int
    counters: int | None


class Counters:
    """The table, for the process with row `index`.  Without a descriptor it is private memory."""

    def __init__(self, descriptor: int | None = None, index: int = 0, count: int = 1) -> None:
        size = 8 * CELLS * count
        memory = bytearray(size) if descriptor is None else mmap.mmap(descriptor, size)
        self._cells = memoryview(memory).cast("d")
        self._own = index * CELLS
        self._used = 0

    def take(self, size: int) -> Cells:
        """The next `size` columns; every process must take the same ones in the same order."""
        first = self._used
        self._used += size
        assert self._used <= CELLS, "counters.CELLS is too small"
        return Cells(self._cells, self._own, first, size)


class Cells:
    """Some columns of the table."""

    def __init__(self, cells: memoryview[float], own: int, first: int, size: int) -> None:
        self._cells = cells
        self._own = own + first
        self._first = first
        self._size = size

    def add(self, place: int, amount: float = 1.0) -> None:
        """Add to this process' row."""
        self._cells[self._own + place] += amount

    def clear(self) -> None:
        """Forget what a predecessor left in this row (for gauges)."""
        for place in range(self._size):
            self._cells[self._own + place] = 0.0

    def total(self, place: int) -> float:
        """The sum over all processes."""
        return sum(self._cells[self._first + place :: CELLS])


def share(count: int) -> int:
    """A descriptor of zeroed memory for `count` processes, to be inherited by them."""
    descriptor = os.memfd_create("tokserve-counters")
    os.ftruncate(descriptor, 8 * CELLS * count)
    return descriptor
