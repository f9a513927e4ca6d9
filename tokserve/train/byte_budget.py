"""How much a call may keep for its backward pass."""

from __future__ import annotations


class ByteBudget:
    """Bytes that may still be kept for the backward pass."""

    def __init__(self, size: int) -> None:
        self._size = size

    def take(self, size: int) -> bool:
        """Whether there are so many; they are taken then."""
        if size > self._size:
            return False
        self._size -= size
        return True
