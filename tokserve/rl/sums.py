"""The checksum of a whole set of weights, which a delta can bring up to date from the changed elements alone.

The sum of a tensor is, modulo 2**64, that of its elements' bits (as unsigned integers, in row-major order), each times
an odd coefficient that belongs to its place.  It is linear, so a change adds coefficient * (new - old).  The checksum
of a set is SHA-256 over the names, dtypes, shapes and sums of its tensors.  It finds accidents: that weights which
differ have equal sums takes a coincidence of about 2**-48.  It is no protection from a forger; `checksum` of `digests`
is.  docs/rl.md specifies it for other implementations.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .native import native

COLUMNS = 4096  # places that share the first factor of their coefficients
BLOCK = 64 * COLUMNS  # elements that are summed at a time
THREADS = 2
UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Sums = dict[str, int]
T = TypeVar("T")
Bits = NDArray[Any]  # unsigned integers
Indices = NDArray[Any]  # unsigned or int64


def bits_of(tensor: Tensor) -> Bits:
    """The elements of a contiguous CPU tensor as unsigned integers, flat; a view.  Not by `numpy()`, after which FSDP
    could not free the tensor's memory."""
    size = tensor.element_size()
    array = np.from_dlpack(tensor.detach().view(-1).view(UNSIGNED[size]))
    return array.view(f"u{size}")


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finalizer of (numbers + 1) * its increment, made odd."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


COLUMN_FACTORS = _mixed(np.arange(COLUMNS, dtype=np.uint64))


@cache
def _row_factors(power: int) -> NDArray[np.uint64]:
    return _mixed(np.arange(COLUMNS, COLUMNS + (1 << power), dtype=np.uint64))


def row_factors(count: int) -> NDArray[np.uint64]:
    """Factors of the first `count` runs of COLUMNS places."""
    return _row_factors(max(10, (max(count, 1) - 1).bit_length()))[:count]


def partial_sum(bits: Bits, start: int = 0) -> int:
    """What elements from place `start` (a multiple of COLUMNS) on add to their tensor's sum."""
    total = 0
    whole = len(bits) // COLUMNS * COLUMNS
    factors = row_factors(-(-(start + len(bits)) // COLUMNS))[start // COLUMNS :]
    with np.errstate(over="ignore"):
        for first in range(0, whole, BLOCK):
            rows = bits[first : min(first + BLOCK, whole)].reshape(-1, COLUMNS)
            sums = (rows.astype(np.uint64) * COLUMN_FACTORS).sum(1, dtype=np.uint64)
            total += int((sums * factors[first // COLUMNS :][: len(sums)]).sum(dtype=np.uint64))
        if whole < len(bits):
            rest = (bits[whole:].astype(np.uint64) * COLUMN_FACTORS[: len(bits) - whole]).sum(dtype=np.uint64)
            total += int(rest) * int(factors[-1])
    return total % (1 << 64)


def tensor_sum(tensor: Tensor) -> int:
    """The sum of a contiguous CPU tensor."""
    return partial_sum(bits_of(tensor))


def change(indices: Indices, old: Bits, new: Bits) -> int:
    """What is added to a tensor's sum when the elements at `indices` (flat) change."""
    if not len(indices):
        return 0
    if native is not None and old.itemsize <= 4:
        return int(native.change(indices.astype(np.int64, copy=False), old, new))
    rows = indices >> 12
    coefficients = row_factors(int(rows.max()) + 1)[rows] * COLUMN_FACTORS[indices & (COLUMNS - 1)]
    return int((coefficients * (new.astype(np.uint64) - old.astype(np.uint64))).sum(dtype=np.uint64))


@cache
def _workers() -> ThreadPoolExecutor:
    """Threads in which torch starts none of its own: each works on tensors that stay in its cache.  They begin once, as
    torch's setting holds for other libraries' threads too while it is made."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(THREADS, "weights", initializer=torch.set_num_threads, initargs=(1,))
    for future in [pool.submit(time.sleep, 0.001) for _ in range(THREADS)]:  # all of them begin
        future.result()
    torch.set_num_threads(threads)  # of threads that begin later
    return pool


os.register_at_fork(after_in_child=_workers.cache_clear)


def in_threads(calls: Iterable[tuple[str, Callable[[], T]]]) -> dict[str, T]:
    """Results by name, of several calls at a time; the longest should come first."""
    pending = [(name, _workers().submit(call)) for name, call in calls]
    return {name: future.result() for name, future in pending}


def completed(calls: Iterable[tuple[str, Callable[[], T]]]) -> Iterator[dict[str, T]]:
    """Results by name, each time those that have come since, at least one; what is not wanted is not begun."""
    names = {_workers().submit(call): name for name, call in calls}
    pending = set(names)
    try:
        while pending:
            done, pending = futures.wait(pending, return_when=futures.FIRST_COMPLETED)
            yield {names[future]: future.result() for future in done}
    finally:
        for future in pending:
            future.cancel()


def set_checksum(sums: Mapping[str, int], described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    """The checksum of a set: a line `NAME DTYPE SIZE,SIZE SUM` a tensor, by name, the sum with 16 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        dtype, shape = described[name]
        sizes = ",".join(map(str, shape))
        digest.update(f"{name} {str(dtype).removeprefix('torch.')} {sizes} {sums[name]:016x}\n".encode())
    return digest.hexdigest()
