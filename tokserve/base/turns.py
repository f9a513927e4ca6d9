"""Clients take turns: of those that wait for a turn, the one whose last turn was longest ago is next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Items of clients.  Of the items of one client, the one of the lowest priority is next, then the oldest."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, list[tuple[int, int, T]]] = OrderedDict()  # by client, in order of their turns
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def add(self, client: str, item: T, priority: int = 0) -> None:
        """Let an item wait."""
        self._number += 1
        heapq.heappush(self._items.setdefault(client, []), (priority, self._number, item))

    def next(self) -> T:
        """Take the next item out.  Raises IndexError if there is none."""
        for client, items in self._items.items():
            _, _, item = heapq.heappop(items)
            del self._items[client]
            if items:
                self._items[client] = items  # behind the others
            return item
        raise IndexError("nothing waits")

    def remove(self, item: T) -> bool:
        """Take an item out; whether it was there."""
        for client, items in self._items.items():
            left = [entry for entry in items if entry[2] is not item]
            if len(left) < len(items):
                heapq.heapify(left)
                self._items[client] = left
                if not left:
                    del self._items[client]
                return True
        return False
