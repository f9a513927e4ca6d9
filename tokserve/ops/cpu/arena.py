"""Memory for packed weights, contiguous in huge pages.

Decoding reads every weight once a step, and address translation of 4 KiB pages takes a tenth of that time.  A weight of
a few MiB with its own mapping lies half outside any aligned 2 MiB, so weights share larger mappings.  A mapping is
freed with its last tensor.
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
    """`size` rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Allocates adjacent tensors; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: weakref.ref[mmap.mmap] | None = None  # alive as long as a tensor in it is
        self._used = 0  # bytes of the chunk

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor [count], aligned to 64 bytes."""
        size = aligned(count * dtype.itemsize)
        if count == 0:
            return torch.empty(0, dtype=dtype)
        if size > CHUNK // 2:
            chunk, offset = _reserve(size)
            return torch.frombuffer(chunk, dtype=dtype, count=count, offset=offset)
        with self._lock:
            current = self._chunk() if self._chunk else None
            if current is None or self._used + size > len(current):
                current, self._used = _reserve(CHUNK)
                self._chunk = weakref.ref(current)
            tensor = torch.frombuffer(current, dtype=dtype, count=count, offset=self._used)
            self._used += size
        return tensor


packed_weights = Arena()  # of the process


def _reserve(size: int) -> tuple[mmap.mmap, int]:
    """A mapping, and the offset of the huge page where its `size` bytes begin; memory is allocated on first touch."""
    chunk = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # kernels without transparent huge pages refuse the advice
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk, -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % HUGE
