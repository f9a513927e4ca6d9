"""The KV store: blocks that are kept in host memory and as files, and come back when a prompt begins with them.

It decides what is kept and what is loaded; the device copies (`copy`, in the lanes pages, read and write), and nothing
here waits for that, but one thing: a block whose copy has begun is not given to another request before it has ended.
A block is kept as soon as it is full, so that it outlives its place in the KV cache.  Blocks that are loaded become
cached blocks like any others; a request that needs them waits as for a prefix that another request computes.

While the identity of the weights is unknown, nothing is kept or loaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from tokserve.engine.kv_cache.block_table import BlockTable
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.features.kv.content_keys import content_keys
from tokserve.features.kv.events import EventLog
from tokserve.features.kv.load_rates import LoadRates
from tokserve.features.kv.slots import MemorySlots
from tokserve.features.kv.stored_events import StoredEvents

Copy = Callable[[Any, str, dict[str, Any]], Future[Any]]  # lane, method, arguments


@dataclass(slots=True, eq=False)
class Save:
    """Pages on their way to slots.  `generation`: of the prefix cache; `era`: of the store."""

    future: Future[float]
    identity: bytes
    keys: list[bytes]
    slots: list[int]
    hashes: list[bytes]
    generation: int
    era: int


@dataclass(slots=True, eq=False)
class FileWrite:
    """Slots on their way to files.  `era`: of the store."""

    future: Future[dict[str, Any]]
    keys: list[bytes]
    slots: list[int]
    era: int


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks on their way to pages: first from files to slots, if they are not there, then from slots.  `read`: indices
    of those from files; `began`, `deadline`: of reading.  `loading` is None when it was given up."""

    loading: BlockTable | None
    tokens: array[int]
    keys: list[bytes]
    slots: list[int]
    read: list[int]
    began: float
    deadline: float
    era: int
    future: Future[Any] | None = None
    is_placed: bool = False


@dataclass(slots=True)
class StoreCounters:
    """Blocks unless said otherwise, since the start."""

    queries: int = 0  # prompt tokens that the prefix cache had not
    hits: int = 0  # those of them that were loaded
    saved: int = 0  # to memory
    written: int = 0  # to files
    loaded: int = 0  # to the KV cache
    read: int = 0  # from files
    dropped: int = 0  # not kept in memory
    failed_writes: int = 0  # not kept in files
    damaged: int = 0  # files
    declined: int = 0  # computing them was faster
    given_up: int = 0  # loads that took too long
    save_seconds: float = 0.0
    load_seconds: float = 0.0
    leased: int = 0  # held for other servers: a gauge
    sent: int = 0  # to other servers
    received: int = 0
    failed_transfers: int = 0  # requests


class KVStore:
    """`num_slots` of `block_bytes` in memory, and files if `has_files`.  `wake` is called from any thread when a copy
    has ended; `tokens_per_second`: see `LoadRates`."""

    def __init__(
        self,
        cache: PrefixCache,
        copy: Copy,
        events: EventLog | None,
        *,
        num_slots: int,
        block_bytes: int,
        has_files: bool,
        tokens_per_second: Callable[[], float],
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._copy_in_lane = copy
        self._has_files = has_files
        self._clock = clock
        self._wake = wake
        self._events = StoredEvents(events)
        self._slots = MemorySlots(num_slots, self._events.left_memory)
        self._rates = LoadRates(block_bytes, cache.block_size, tokens_per_second)
        self.counters = StoreCounters()
        self._identity: bytes | None = None
        self._files: set[bytes] = set()  # keys of this identity
        self._era = 0
        self._saves: list[Save] = []
        self._writes: list[FileWrite] = []
        self._loads: list[BlockLoad] = []
        self._saving: dict[bytes, Future[float]] = {}  # by hash
        self._new_keys: set[bytes] = set()  # of saves that have not ended
        cache.store, cache.before_reuse = self, self._before_reuse

    # --- for the core ---

    @property
    def busy(self) -> bool:
        """Whether copies are on their way."""
        return bool(self._saves or self._writes or self._loads)

    @property
    def loading(self) -> bool:
        """Whether requests may wait for blocks."""
        return any(load.loading is not None for load in self._loads)

    @property
    def identity(self) -> bytes | None:
        """The identity of the weights that serve; None: it is not known."""
        return self._identity

    def seconds_left(self) -> float | None:
        """Until a load is given up."""
        ends = [load.deadline for load in self._loads if load.loading is not None and not load.is_placed]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def use(self, identity: bytes | None, files: Sequence[bytes] = ()) -> None:
        """KV that is computed from here on has this identity, with these keys among the files."""
        self._identity = identity
        self._files = set(files)

    def clear(self) -> None:
        """Drop everything, in memory and in files."""
        self._era += 1
        self._slots.clear()
        self._files.clear()
        if self._has_files:
            self._copy("write", "clear_files", {})

    def on_reset(self) -> None:
        """The prefix cache is empty, and subscribers of events have forgotten everything."""
        self._events.cleared()

    def poll(self) -> None:
        """Take the copies that have ended since the last call, and give up what takes too long."""
        if self._saves:
            self._saves = [save for save in self._saves if not self._end_save(save)]
        if self._writes:
            self._writes = [write for write in self._writes if not self._end_write(write)]
        if self._loads:
            now = self._clock()
            self._loads = [load for load in self._loads if not self._advance(load, now)]

    def stats(self) -> dict[str, float]:
        """The counters, and the blocks that are kept in memory and in files."""
        return {"memory_blocks": len(self._slots), "file_blocks": len(self._files), **asdict(self.counters)}

    def _copy(self, lane: str, method: str, args: dict[str, Any]) -> Future[Any]:
        future = self._copy_in_lane(lane, method, args)
        future.add_done_callback(lambda _: self._wake())
        return future

    # --- blocks that are kept ---

    def save(self, table: BlockTable, tokens: array[int], indices: Sequence[int]) -> None:
        """Copy these blocks of the table, which can be found in the cache from now on, unless they are kept already."""
        if self._identity is None:
            return
        keys = content_keys(self._identity, table, tokens, indices[-1] + 1, self._cache.block_size)
        if not keys:
            return
        new = [index for index in indices if not self._is_kept(keys[index])]
        slots = self._slots.take(len(new))
        self.counters.dropped += len(new) - len(slots)
        new = new[: len(slots)]  # a prefix is of use without its tail
        if not new:
            return
        hashes = [table.hashes[index] for index in new]
        blocks = [table.blocks[index] for index in new]
        future = self._copy("pages", "save_blocks", {"blocks": blocks, "slots": slots})
        new_keys = [keys[index] for index in new]
        self._events.describe(table, tokens, new, new_keys)
        self._saving.update(dict.fromkeys(hashes, future))
        self._new_keys.update(new_keys)
        self._saves.append(Save(future, self._identity, new_keys, slots, hashes, self._cache.generation, self._era))

    def _is_kept(self, key: bytes) -> bool:
        if key in self._slots:
            self._slots.use(key)
            return True
        return key in self._files or key in self._new_keys

    def _before_reuse(self, block_hash: bytes) -> None:
        """A block is about to get other content: its copy must have ended."""
        future = self._saving.get(block_hash)
        if future is not None:
            future.result()

    def _end_save(self, save: Save) -> bool:
        if not save.future.done():
            return False
        seconds = save.future.result()
        for block_hash in save.hashes:
            if self._saving.get(block_hash) is save.future:
                del self._saving[block_hash]
        self._new_keys.difference_update(save.keys)
        # after a reset, blocks may have been used for other content while they were copied
        if save.generation == self._cache.generation and save.era == self._era:
            self.counters.saved += len(save.keys)
            self.counters.save_seconds += seconds
            kept = [key for key, slot in zip(save.keys, save.slots, strict=True) if self._slots.keep(key, slot)]
            self._events.in_memory(kept)
            if self._has_files:
                self._write(save)
        self._slots.unpin(save.slots)
        return True

    def _write(self, save: Save) -> None:
        """Write to files, unless so many blocks wait for that already that they would fill half of the memory."""
        waiting = sum(len(write.slots) for write in self._writes)
        room = max(1, self._slots.total // 2) - waiting
        keys, slots = save.keys[: max(0, room)], save.slots[: max(0, room)]
        self.counters.failed_writes += len(save.keys) - len(keys)
        if keys:
            self._slots.pin(slots)
            args = {"identity": save.identity, "keys": keys, "slots": slots}
            self._writes.append(FileWrite(self._copy("write", "write_files", args), keys, slots, self._era))

    def _end_write(self, write: FileWrite) -> bool:
        if not write.future.done():
            return False
        result = write.future.result()
        self._slots.unpin(write.slots)
        self.counters.written += len(result["written"])
        self.counters.failed_writes += result["failed"]
        if write.era != self._era:  # they were written before all files were deleted
            return True
        self._files.update(result["written"])
        self._events.in_files(result["written"])
        for key in result["deleted"]:
            self._files.discard(key)
            self._events.left_files(key)
        return True

    def expect_files(self, keys: Sequence[bytes]) -> None:
        """Another process says that it has written these."""
        if self._has_files:
            self._files.update(keys)

    def num_in_files(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, are files."""
        return next((index for index, key in enumerate(keys) if key not in self._files), len(keys))

    def is_writing(self, key: bytes) -> bool:
        """Whether a block is on its way to memory or to a file."""
        return key in self._new_keys or any(key in write.keys for write in self._writes)

    # --- blocks that come back ---

    def load(self, table: BlockTable, tokens: array[int], hits: int, usable: int, *, must: bool = False) -> bool:
        """Begin to load what is kept of the blocks after the first `hits`, if that is faster than computing them, or
        `must` be done; whether the table's request waits for it."""
        if self._identity is None:
            return False
        table.may_load = False
        size = self._cache.block_size
        keys = content_keys(self._identity, table, tokens, usable, size)
        if not keys:
            return False
        self.counters.queries += (usable - hits) * size
        missing = keys[hits : hits + self._cache.num_unclaimed(table, hits, usable - hits)]
        count = self._num_to_load(missing, must=must)
        if not count:
            return False
        self._begin_load(table, tokens, hits, missing[:count])
        return True

    def _num_to_load(self, keys: Sequence[bytes], *, must: bool) -> int:
        """How many of these blocks, from the first on, are kept and worth loading."""
        count = in_memory = from_files = 0
        most_read = 0 if self._is_late() else self._slots.total // 2
        for key in keys:
            if key in self._slots:
                in_memory += not from_files
            elif key in self._files and from_files < most_read:
                from_files += 1
            else:
                break
            count += 1
        now = self._clock()
        queued = sum(len(load.read) for load in self._loads if not load.is_placed)
        for blocks, files in ((count, from_files), (in_memory, 0)):
            if blocks and (must or self._rates.is_worthwhile(blocks, files, queued, now)):
                self.counters.declined += count - blocks
                return blocks
        self.counters.declined += count
        return 0

    def _is_late(self) -> bool:
        """Whether a load from files that was given up still has the thread that reads."""
        return any(load.loading is None for load in self._loads)

    def _begin_load(self, table: BlockTable, tokens: array[int], hits: int, keys: list[bytes]) -> None:
        in_memory = [self._slots.use(key) for key in keys if key in self._slots]
        self._slots.pin(in_memory)
        read = [index for index, key in enumerate(keys) if key not in self._slots]
        free = self._slots.take(len(read))
        if len(free) < len(read):  # all others are in use: load up to the first for which there is none
            keys, read = keys[: read[len(free)]], read[: len(free)]
        slots: list[int] = []
        spare = iter(free)
        for index, key in enumerate(keys):
            slots.append(next(spare) if index in set(read) else self._slots.use(key))
        self._slots.unpin(slot for slot in in_memory if slot not in set(slots))
        now = self._clock()
        load = BlockLoad(
            self._cache.begin_load(table, hits, len(keys)),
            tokens[: (hits + len(keys)) * self._cache.block_size],
            keys,
            slots,
            read,
            now,
            now + self._rates.patience(len(read)),
            self._era,
        )
        self._loads.append(load)
        if read:
            args = {
                "identity": self._identity,
                "keys": [keys[index] for index in read],
                "slots": [slots[index] for index in read],
            }
            load.future = self._copy("read", "read_files", args)
        elif self._place(load):
            self._loads.remove(load)

    def _advance(self, load: BlockLoad, now: float) -> bool:
        """Go on with a load; whether it is over."""
        assert load.future is not None
        if not load.future.done():
            if not load.is_placed and load.loading is not None and now >= load.deadline:
                self._give_up(load, now)
            return False
        if load.is_placed:
            seconds = load.future.result()
            self._rates.loaded(len(load.keys), seconds)
            self.counters.load_seconds += seconds
            self.counters.loaded += len(load.keys)
            self.counters.hits += len(load.keys) * self._cache.block_size
            return self._end_load(load, len(load.keys))
        self._take_read(load, load.future.result(), now)
        return self._end_load(load, 0) if load.loading is None else self._place(load)

    def _take_read(self, load: BlockLoad, result: dict[str, Any], now: float) -> None:
        """What came from files is in memory too from here on; the load ends before the first that did not come."""
        count = result["count"]
        if count:
            self._rates.read(count, result["seconds"], now)
        self.counters.read += count
        self.counters.load_seconds += result["seconds"]
        self.counters.damaged += result["damaged"]
        for index in load.read[:count]:
            if load.era == self._era:
                self._slots.keep(load.keys[index], load.slots[index])
        missing = load.read[count:]
        if missing:
            self._files.discard(load.keys[missing[0]])
            self._events.left_files(load.keys[missing[0]])
            self._shorten(load, missing[0])

    def _shorten(self, load: BlockLoad, count: int) -> None:
        self._slots.unpin(load.slots[count:])
        del load.keys[count:], load.slots[count:]
        if load.loading is not None:
            self._cache.shorten_load(load.loading, count)

    def _place(self, load: BlockLoad) -> bool:
        """Copy to pages what is in memory now; True: there is nothing to copy, or no room, and the load is over."""
        assert load.loading is not None
        blocks = self._cache.place_load(load.loading) if load.keys else None
        if blocks is None:
            return self._end_load(load, 0)
        load.is_placed = True
        load.future = self._copy("pages", "load_blocks", {"blocks": blocks, "slots": load.slots})
        return False

    def _give_up(self, load: BlockLoad, now: float) -> None:
        """Reading takes too long: the requests that wait compute."""
        assert load.loading is not None
        self.counters.given_up += 1
        self._rates.timed_out(len(load.read), now - load.began, now)
        self._cache.end_load(load.loading, load.tokens, 0)
        load.loading = None

    def _end_load(self, load: BlockLoad, count: int) -> bool:
        if load.loading is not None:
            self._cache.end_load(load.loading, load.tokens, count)
        self._slots.unpin(load.slots)
        return True
