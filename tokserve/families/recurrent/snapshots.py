"""Snapshots of recurrent states: which ends of cached prefixes have one, and which are free.

A snapshot is reserved when a step is planned that takes it, kept under the hash of the prefix's last block once it is
taken, and dropped when others need its place, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict

from tokserve.engine.kv_cache.block_pool import CacheBroken


class Snapshots:
    """`total` snapshots, one every `interval` blocks of a request and one where its prompt's last full block ends."""

    def __init__(self, total: int, interval: int) -> None:
        self.total = total
        self.interval = interval
        self._free = list(range(total - 1, -1, -1))  # a stack
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # by hash, least recently used first
        self._reserved: set[int] = set()

    @property
    def num_kept(self) -> int:
        """Snapshots that can be found."""
        return len(self._kept)

    def is_due(self, index: int, last: int) -> bool:
        """Whether a request whose prompt has `last` full blocks has its state saved after so many blocks."""
        return self.total > 0 and index > 0 and (index % self.interval == 0 or index == last)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._kept

    def use(self, block_hash: bytes) -> int:
        """The snapshot kept under this hash, which counts as used now."""
        self._kept.move_to_end(block_hash)
        return self._kept[block_hash]

    def reserve(self) -> int | None:
        """A snapshot to be taken; None if all are about to be."""
        if self._free:
            snapshot = self._free.pop()
        elif self._kept:
            _, snapshot = self._kept.popitem(last=False)
        else:
            return None
        self._reserved.add(snapshot)
        return snapshot

    def release(self, snapshot: int) -> None:
        """A reserved one was not taken, or is of no use."""
        self._reserved.remove(snapshot)
        self._free.append(snapshot)

    def keep(self, snapshot: int, block_hash: bytes) -> None:
        """A reserved one was taken; let it be found, unless there is one under this hash."""
        if block_hash in self._kept:
            self.release(snapshot)
            return
        self._reserved.remove(snapshot)
        self._kept[block_hash] = snapshot

    def clear(self) -> None:
        """Forget all snapshots, so that none is found."""
        self._free.extend(self._kept.values())
        self._kept.clear()

    def check(self) -> None:
        """Raise `CacheBroken` if one was lost, or is in two places."""
        everywhere = sorted([*self._free, *self._kept.values(), *self._reserved])
        if everywhere != list(range(self.total)):
            raise CacheBroken(f"of {self.total} snapshots, {len(everywhere)} are accounted for")

    def check_idle(self) -> None:
        """Raise `CacheBroken` if one is reserved, for when nothing runs."""
        if self._reserved:
            raise CacheBroken(f"nothing runs, but {len(self._reserved)} snapshots are reserved")
