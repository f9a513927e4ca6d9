"""A cache of images with a limit of bytes: of processed ones, and of those that clients refer to by name."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """Values by key, up to `max_bytes`, where a value has `size(value)` bytes; the least recently used go first.
    Thread-safe.  `on_lookup`: is called with whether a key was there."""

    def __init__(self, max_bytes: int, size: Callable[[V], int]) -> None:
        self._max_bytes = max_bytes
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.on_lookup: Callable[[bool], None] | None = None

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
        if self.on_lookup is not None:
            self.on_lookup(value is not None)
        return value

    def put(self, key: K, value: V) -> None:
        """Keep a value in place of the key's earlier one, unless it is larger than the cache."""
        size = self._size(value)
        if size > self._max_bytes:
            return
        with self._lock:
            before = self._values.pop(key, None)
            self.num_bytes += size - (0 if before is None else self._size(before))
            self._values[key] = value
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._size(self._values.popitem(last=False)[1])


NamedImages = ByteCache[tuple[str, str], tuple[bytes, bytes]]  # by salt and the client's name: hash, encoded image
