"""Blocks that are kept for another server: held until it has them, gives them back, or is silent for too long.

The engine's loop makes and ends leases; threads of connections look at them, so they are behind a lock.  The loop frees
blocks of a lease that has ended only when no connection reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokserve.engine.kv_cache.block_table import BlockTable


@dataclass(slots=True, eq=False)
class BlockLease:
    """`table` holds the blocks; `keys`: of these.  `expiry`: by the clock of `LeaseTable`."""

    request_id: str
    table: BlockTable
    keys: list[bytes]
    expiry: float
    readers: int = 0
    ended: bool = False


class LeaseTable:
    """Leases by the id of their request.  `seconds`: how long one lasts without a heartbeat."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, BlockLease] = {}
        self._ended: list[BlockLease] = []

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are held."""
        with self._lock:
            return sum(len(lease.table.blocks) for lease in (*self._leases.values(), *self._ended))

    def add(self, request_id: str, table: BlockTable, keys: list[bytes]) -> BlockLease:
        """Hold the blocks of a table until the lease ends."""
        lease = BlockLease(request_id, table, keys, self._clock() + self.seconds)
        with self._lock:
            self._end(request_id)
            self._leases[request_id] = lease
        return lease

    def _end(self, request_id: str) -> None:
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            lease.ended = True
            self._ended.append(lease)

    def end(self, request_ids: Iterable[str]) -> None:
        """These are not needed any more."""
        with self._lock:
            for request_id in request_ids:
                self._end(request_id)

    def end_all(self) -> None:
        """Their blocks mean nothing any more."""
        with self._lock:
            for request_id in list(self._leases):
                self._end(request_id)

    def extend(self, request_ids: Iterable[str]) -> int:
        """A heartbeat; how many of these there are."""
        with self._lock:
            known = [self._leases[request_id] for request_id in request_ids if request_id in self._leases]
            for lease in known:
                lease.expiry = self._clock() + self.seconds
            return len(known)

    def begin_read(self, request_id: str) -> BlockLease | None:
        """Its blocks are being read from here on; None: there is no such lease."""
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is not None:
                lease.readers += 1
            return lease

    def end_read(self, lease: BlockLease) -> None:
        """They are not any more."""
        with self._lock:
            lease.readers -= 1

    def take_ended(self) -> list[BlockLease]:
        """Leases whose blocks can be freed, those that have expired too."""
        now = self._clock()
        with self._lock:
            for lease in list(self._leases.values()):
                if lease.expiry <= now and not lease.readers:
                    self._end(lease.request_id)
            free = [lease for lease in self._ended if not lease.readers]
            self._ended = [lease for lease in self._ended if lease.readers]
            return free

    def seconds_left(self) -> float | None:
        """Until the first one expires; None: there is none."""
        with self._lock:
            ends = [lease.expiry for lease in self._leases.values() if not lease.readers]
            return max(0.0, min(ends) - self._clock()) if ends else None
