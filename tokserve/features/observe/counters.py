"""Counters in memory shared by the API processes: each process adds to its own row, and any process can sum the rows.

The sums are exact at any time, need no messages, and outlive a process: its successor continues in the same row.
"""

from __future__ import annotations

import mmap
import os

CELLS = 1024  # float64 values in a row: more than there are metrics


class SharedCounters:
    """The table, as used by the process with row `index`.  Without a descriptor the memory is private."""

    def __init__(self, descriptor: int | None = None, index: int = 0, count: int = 1) -> None:
        size = 8 * CELLS * count
        memory = bytearray(size) if descriptor is None else mmap.mmap(descriptor, size)
        self._cells = memoryview(memory).cast("d")
        self._row = index * CELLS
        self._used = 0

    def allocate(self, size: int) -> CounterColumns:
        """The next `size` columns; every process must allocate the same ones in the same order."""
        first = self._used
        self._used += size
        assert self._used <= CELLS, "counters.CELLS is too small"
        return CounterColumns(self._cells, self._row, first, size)


class CounterColumns:
    """Some columns of the table."""

    def __init__(self, cells: memoryview[float], row: int, first: int, size: int) -> None:
        self._cells = cells
        self._row = row + first
        self._first = first
        self._size = size

    def add(self, index: int, amount: float = 1.0) -> None:
        """Add to a value in this process' row."""
        self._cells[self._row + index] += amount

    def clear(self) -> None:
        """Set this row to zero: a predecessor may have left values (for gauges)."""
        for index in range(self._size):
            self._cells[self._row + index] = 0.0

    def total(self, index: int) -> float:
        """The sum of a column over all processes."""
        return sum(self._cells[self._first + index :: CELLS])


def create_shared_memory(count: int) -> int:
    """A descriptor of zeroed memory for `count` processes, which inherit it."""
    descriptor = os.memfd_create("tokserve-counters")
    os.ftruncate(descriptor, 8 * CELLS * count)
    return descriptor
