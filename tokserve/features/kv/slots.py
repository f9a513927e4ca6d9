"""Slots of host memory that keep KV blocks: which block each holds, which are in use, and which is replaced next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from itertools import islice


class MemorySlots:
    """Slots by the key of their block, least recently used first.  A slot that is pinned is not replaced.  `on_evicted`
    is called with the key of each block that is dropped for another one."""

    def __init__(self, total: int, on_evicted: Callable[[bytes], object]) -> None:
        self.total = total
        self._on_evicted = on_evicted
        self._free = list(range(total - 1, -1, -1))  # a stack
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._holding: set[int] = set()  # slots with a block
        self._pins: Counter[int] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    def use(self, key: bytes) -> int:
        """The slot of a block, which counts as used now."""
        self._by_key.move_to_end(key)
        return self._by_key[key]

    def take(self, count: int, keep: Collection[bytes] = ()) -> list[int]:
        """Up to `count` slots, pinned, for other blocks than they had; none of those with the blocks `keep`."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        replaceable = (key for key, slot in self._by_key.items() if slot not in self._pins and key not in keep)
        for key in list(islice(replaceable, count - len(taken))):
            taken.append(self._drop(key))
            self._on_evicted(key)
        self.pin(taken)
        return taken

    def _drop(self, key: bytes) -> int:
        slot = self._by_key.pop(key)
        self._holding.remove(slot)
        return slot

    def keep(self, key: bytes, slot: int) -> bool:
        """A pinned slot holds this block from here on; False, and no effect, if another one does."""
        if key in self._by_key:
            return False
        self._by_key[key] = slot
        self._holding.add(slot)
        return True

    def pin(self, slots: Iterable[int]) -> None:
        """They are being read or written."""
        self._pins.update(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        """They are not any more; those that hold no block are free."""
        for slot in slots:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if slot not in self._holding:
                    self._free.append(slot)

    def clear(self) -> None:
        """Drop all blocks."""
        for key in list(self._by_key):
            slot = self._drop(key)
            if slot not in self._pins:
                self._free.append(slot)
