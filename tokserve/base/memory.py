"""The memory of a long-lived process: when full collections of garbage run, and free memory that goes back.

A full collection visits every object that Python keeps, and holds the interpreter's lock meanwhile: a fifth of a second
beside a few large bodies, whose decoding would begin one after the other.  Requests leave no cycles, so nearly
everything is freed by its reference count, and what is left can wait.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

NEVER = 1 << 30  # collections of the middle generation before Python begins a full one
LOOK = 1.0  # seconds between two looks at whether a full collection is due
SOON = 10.0  # seconds from one full collection to the next while there are few objects
LATEST = 60.0  # and at any moment
IDLE = 5.0  # seconds without work after which free memory goes back
FEW = 200_000  # blocks of memory beyond those of the start: they are visited in some milliseconds
MMAP_THRESHOLD, ARENA_MAX = -3, -8  # of mallopt(3)
MAPPED = 1 << 18  # bytes of an allocation that has pages of its own, which go back when it is freed
ARENAS = 2
VISITS = 10
UNMAPPED_AT_ONCE = 1 << 22  # bytes
FREED_AT_ONCE = 1 << 10  # values
NO_OTHERS = 2  # references to an entry of a list: the list, and the argument of `getrefcount`
_LIBC = ctypes.CDLL(None)


def gib(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 100 << 20 else f"{count / (1 << 20):.1f} MiB"


@contextmanager
def no_collections() -> Iterator[None]:
    """Do not look for garbage: an import makes hundreds of thousands of objects, and nearly all of them stay.  That of
    torch takes a fourth less.  Later collections skip what was made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class FullCollections:
    """The full collections of this process from here on: those of `run_if_due`, until `stop`.  Objects made so far are
    never visited: they live as long as the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], NEVER)
        self._clock = clock
        self._blocks = sys.getallocatedblocks()
        self._last = clock()
        self._next = self._last + SOON

    def stop(self) -> None:
        """Let Python decide again."""
        gc.set_threshold(*self._thresholds)

    def run_if_due(self) -> None:
        """Run one if the last is long enough ago.  Call it often: it costs nothing in between."""
        now = self._clock()
        if now < self._next:
            return
        if sys.getallocatedblocks() - self._blocks < FEW or now >= self._last + LATEST:
            gc.collect()
            drop_caches()
            self._last = self._clock()
            self._next = self._last + SOON
        else:
            self._next = now + LOOK


class IdleMemory:
    """Gives free memory back once the process has been idle for IDLE seconds after work: `turn` is called in every turn
    of its loop, which sleeps for no longer than `sleep` says."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: float | None = None

    def turn(self, busy: bool) -> None:
        if busy:
            self._due = self._clock() + IDLE
        elif self._due is not None and self._clock() >= self._due:
            give_back()
            self._due = None

    def sleep(self, seconds: float | None) -> float | None:
        """How long the loop may sleep, where its work allows `seconds` (None: without end)."""
        if self._due is None:
            return seconds
        left = max(0.0, self._due - self._clock())
        return left if seconds is None else min(seconds, left)


def drop_caches() -> None:
    """Drop what caches of the interpreter and of msgspec hold of requests that have ended: names of attributes, and
    keys of JSON objects.  They are filled again within microseconds; but each was made among a request's objects, and
    may hold a mebibyte of Python's allocator.  msgspec drops keys in one of `VISITS` visits to its module, which
    collections of garbage do not make once the module is frozen."""
    with suppress(AttributeError):
        sys._clear_type_cache()
    if (module := sys.modules.get("msgspec._core")) is not None:
        for _ in range(VISITS):
            gc.get_referents(module)


def give_back() -> None:
    """Return memory that the C allocator holds unused to the system, where the allocator can (glibc): some
    milliseconds."""
    with suppress(AttributeError):
        _LIBC.malloc_trim(0)


def free_in_parts(values: list[Any]) -> None:
    """Free decoded JSON, a part at a time: other threads get the interpreter's lock in between, which freeing a large
    list at once would hold.  `values` is emptied.  Lists and dictionaries that are referred to elsewhere stay as they
    are."""
    part: list[Any] = []
    while values:
        part.clear()
        is_shared = sys.getrefcount(values[-1]) > NO_OTHERS  # not of a variable: Python 3.14 does not count each
        value = values.pop()
        if is_shared:
            continue
        while value:
            if isinstance(value, dict):
                part = [value.popitem()[1]]
            else:
                part = value[-FREED_AT_ONCE:]
                del value[-FREED_AT_ONCE:]
            values += [inner for inner in part if isinstance(inner, list | dict) and len(inner) > FREED_AT_ONCE]


def unmap(pages: mmap.mmap) -> None:
    """Close anonymous pages, from any thread.  They go back before that without the interpreter's lock, which `close`
    would hold meanwhile, and in parts, because other threads may wait for the lock of the process's memory map."""
    first = ctypes.c_char.from_buffer(pages)
    address, size = ctypes.addressof(first), len(pages)
    for start in range(0, size, UNMAPPED_AT_ONCE):
        part = min(UNMAPPED_AT_ONCE, size - start)
        _LIBC.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(part), mmap.MADV_DONTNEED)
    del first  # pages that it refers to cannot be closed
    pages.close()


def keep_apart() -> None:
    """Give large allocations pages of their own, and threads two heaps, so that less of what is freed stays between
    what is in use: for a process whose requests are of all sizes.  Only with glibc; before its threads work."""
    share_heaps()
    with suppress(AttributeError):
        _LIBC.mallopt(MMAP_THRESHOLD, MAPPED)


def share_heaps() -> None:
    """Have all threads use two heaps: `give_back` does not return the free end of a thread's heap, and with a heap for
    each thread there are many such ends.  Only with glibc; before threads work."""
    with suppress(AttributeError):
        _LIBC.mallopt(ARENA_MAX, ARENAS)
