"""Memory for packed weights, side by side in huge pages.

Decoding reads every weight once a step, and translating an address per 4 KiB page takes a tenth of its time.  A weight
of a few MiB with a mapping of its own lies half outside any aligned 2 MiB, so weights share larger mappings.  A mapping
is given back with the last tensor in it.  This file must not know what the tensors hold.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 64 << 20
ALIGNMENT = 64  # a cache line


def aligned(size: int) -> int:
    """So many bytes, rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Hands out tensors that lie one behind the other; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None  # alive as long as a tensor in it is
        self._used = 0  # bytes from the beginning of the chunk

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] of any contents, at a multiple of 64 bytes."""
        size = aligned(count * dtype.itemsize)
        if count == 0:
            return torch.empty(0, dtype=dtype)
        if size > CHUNK // 2:
            chunk, at = _reserve(size)
            return torch.frombuffer(chunk, dtype=dtype, count=count, offset=at)
        with self._lock:
            current = self._chunk() if self._chunk else None
            if current is None or self._used + size > len(current):
                current, self._used = _reserve(CHUNK)
                self._chunk = weakref.ref(current)
            found = torch.frombuffer(current, dtype=dtype, count=count, offset=self._used)
            self._used += size
        return found


def _reserve(size: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where in it `size` bytes begin at a huge page; memory is taken as it is touched."""
    chunk = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # advice, which a kernel may not know
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk, -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % HUGE
