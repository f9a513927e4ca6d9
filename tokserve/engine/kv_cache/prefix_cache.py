"""The prefix cache over the block pool: which blocks of a prompt are computed already, and the running block tables.

The hash of a full block covers all tokens and features up to its end.  The chain begins with model, weight epoch,
variant and cache salt, and is keyed with a secret of this process, so that neither stale weights nor another tenant's
text can be hit, not even on purpose.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Protocol

import msgspec

from tokserve.engine.kv_cache.block_pool import BlockPool, CacheBroken
from tokserve.engine.kv_cache.block_table import BlockTable, features_key
from tokserve.engine.variant import Variant
from tokserve.protocol.prompt import Feature


class BlockStore(Protocol):
    """What keeps blocks outside of the KV cache."""

    def save(self, table: BlockTable, tokens: array[int], indices: Sequence[int]) -> None:
        """These blocks of the table can be found from now on."""

    def on_reset(self) -> None:
        """The prefix cache is empty."""

    def load(self, table: BlockTable, tokens: array[int], hits: int, usable: int) -> bool:
        """Begin to load blocks that follow the first `hits`, if that is of use; whether the table's request waits."""


class RemoteBlocks(Protocol):
    """Where blocks of some requests come from that another server has computed."""

    def on_reset(self) -> None:
        """The prefix cache is empty."""

    def load(self, table: BlockTable, tokens: array[int], hits: int, usable: int) -> bool:
        """Begin to load blocks that follow the first `hits`, or go on with that; whether the table's request waits."""


class BlockEvents(Protocol):
    """What is told of every block that can be found from then on, or no longer."""

    def stored(
        self,
        parent: bytes | None,
        hashes: Sequence[bytes],
        tokens: array[int],
        start: int,
        *,
        variant: Variant | None,
        cache_salt: str,
        features: Sequence[Feature],
    ) -> None:
        """Blocks of the tokens from position `start` on can be found; `parent`: the hash before them."""

    def removed(self, block_hash: bytes) -> None:
        """A block cannot be found any more."""

    def cleared(self) -> None:
        """No block can be found any more."""


class StateSnapshots(Protocol):
    """Which prefixes have a snapshot of a recurrent state, by the hash of their last block."""

    @property
    def total(self) -> int: ...

    def __contains__(self, block_hash: bytes) -> bool: ...

    def is_due(self, index: int, last: int) -> bool:
        """Whether a request whose prompt has `last` full blocks has its state saved after so many blocks."""

    def use(self, block_hash: bytes) -> int:
        """The snapshot kept under this hash, which counts as used now."""

    def reserve(self) -> int | None:
        """A snapshot to be taken; None if all are about to be."""

    def release(self, snapshot: int) -> None:
        """A reserved one was not taken, or is of no use."""

    def keep(self, snapshot: int, block_hash: bytes) -> None:
        """A reserved one was taken; let it be found, unless there is one under this hash."""

    def clear(self) -> None:
        """Forget all snapshots, so that none is found."""

    def check(self) -> None:
        """Raise `CacheBroken` if one was lost, or is in two places."""

    def check_idle(self) -> None:
        """Raise `CacheBroken` if one is reserved, for when nothing runs."""


class PrefixCache:
    """Block tables over a `BlockPool`; with `enabled` False no block is found again.

    `snapshots`: of a model with recurrent states, whose prefixes are of use as far as there is a snapshot of them.
    `store` keeps blocks elsewhere, and `transfers` brings some from there.  Features set these and `events`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enabled: bool,
        model: str,
    ) -> None:
        self.block_size = block_size
        self.events: BlockEvents | None = None
        self.store: BlockStore | None = None
        self.transfers: RemoteBlocks | None = None
        self.before_reuse: Callable[[bytes], object] = lambda block_hash: None
        self.pool = BlockPool(num_blocks, self._on_evicted)
        self.snapshots: StateSnapshots | None = None
        self.enabled = enabled
        self._model, self._epoch = model, 0
        self._key = secrets.token_bytes(32)
        self._generation = 0
        self._tables: set[BlockTable] = set()
        self._pending: dict[bytes, BlockTable] = {}  # hashes of blocks being computed, and for which table

    def _on_evicted(self, block_hash: bytes) -> None:
        self.before_reuse(block_hash)
        if self.events is not None:
            self.events.removed(block_hash)

    @property
    def generation(self) -> int:
        """Rises with each reset: blocks of earlier generations are never found."""
        return self._generation

    @property
    def num_tables(self) -> int:
        """Tables that hold blocks, or wait for some that are loaded."""
        return len(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, table: BlockTable, tokens: array[int], usable: int) -> int | None:
        """How many leading blocks, at most `usable`, can be taken from the cache.  None: the first one missing is being
        computed for another request; wait for it."""
        if not self.enabled:
            return 0
        self._extend_hashes(table, tokens, usable)
        hits = 0
        while hits < usable and self.pool.lookup(table.hashes[hits]) is not None:
            hits += 1
        table.awaited = None
        if self.transfers is not None and self.transfers.load(table, tokens, hits, usable):
            if hits < usable and table.hashes[hits] in self._pending:
                table.awaited = table.hashes[hits]
            return None
        if self.snapshots is not None:
            return self._lookup_state(table, self.snapshots, hits, usable)
        if hits < usable and table.hashes[hits] in self._pending:
            table.awaited = table.hashes[hits]
            return None
        if hits < usable and self.store is not None and table.may_load and self.store.load(table, tokens, hits, usable):
            table.awaited = table.hashes[hits]
            return None
        return hits

    def _lookup_state(self, table: BlockTable, snapshots: StateSnapshots, hits: int, usable: int) -> int | None:
        """The leading blocks up to the last snapshot; None if another request is about to take a later one."""
        while hits and table.hashes[hits - 1] not in snapshots:
            hits -= 1
        for index in range(hits + 1, usable + 1):
            block_hash = table.hashes[index - 1]
            computed_for = self._pending.get(block_hash)
            if computed_for is not None and snapshots.is_due(index, computed_for.prompt_blocks):
                table.awaited = block_hash
                return None
        return hits

    def snapshot_after(self, table: BlockTable, hits: int) -> int:
        """The snapshot of the state after the first `hits` blocks, which `lookup` has just found; -1 for none."""
        return self.snapshots.use(table.hashes[hits - 1]) if self.snapshots is not None and hits else -1

    def plan_saves(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]]:
        """(position, snapshot) of those to be taken of a state that goes on from position `start` to `end`."""
        snapshots, size = self.snapshots, self.block_size
        if snapshots is None or not snapshots.total or not self.is_current(table):
            return []
        first, last = start // size + 1, end // size
        saves = []
        for index in range(first, last + 1):
            known = index <= len(table.hashes) and table.hashes[index - 1] in snapshots
            if not known and snapshots.is_due(index, table.prompt_blocks):
                snapshot = snapshots.reserve()
                if snapshot is not None:
                    saves.append((index * size, snapshot))
        return saves

    def record_saves(self, table: BlockTable, saves: Sequence[tuple[int, int]], taken: Collection[int]) -> None:
        """Record which of these snapshots were taken: they belong to full blocks of the table that are indexed now."""
        assert self.snapshots is not None
        is_current = self.is_current(table)
        for position, snapshot in saves:
            index = position // self.block_size
            if is_current and snapshot in taken and index <= table.num_full:
                self.snapshots.keep(snapshot, table.hashes[index - 1])
            else:
                self.snapshots.release(snapshot)

    def must_wait(self, table: BlockTable) -> bool:
        """Whether the block that the last lookup found pending is still being computed."""
        return table.awaited is not None and table.awaited in self._pending

    def allocate(self, table: BlockTable, tokens: array[int], hits: int, reserve: int) -> bool:
        """Give `table` its first `hits` blocks from the cache and new ones for the rest of `tokens`.

        False, and no change, if fewer than `reserve` blocks would be left.  The blocks to be computed are pending for
        others with the same prefix until they are full and computed, or freed.
        """
        cached = self._cached_blocks(table, hits)
        unused = sum(not self.pool.is_in_use(block) for block in cached)
        missing = self.blocks_for(len(tokens)) - hits
        if missing + unused + reserve > self.pool.num_available:
            return False
        for block in cached:
            self.pool.ref(block)
        new = self.pool.allocate(missing)
        assert new is not None
        table.blocks = cached + new
        table.num_full = hits
        table.may_load = True
        table.prompt_blocks = full = len(tokens) // self.block_size
        self._tables.add(table)
        if self.enabled:
            self._extend_hashes(table, tokens, full)
            for block_hash in table.hashes[hits:full]:
                if self.pool.lookup(block_hash) is None:
                    self._pending.setdefault(block_hash, table)
        return True

    def _cached_blocks(self, table: BlockTable, hits: int) -> list[int]:
        blocks = [self.pool.lookup(block_hash) for block_hash in table.hashes[:hits]]
        assert None not in blocks
        return [block for block in blocks if block is not None]

    def extend(self, table: BlockTable, num_tokens: int, reserve: int = 0) -> bool:
        """Make room for `num_tokens` in a running request's table.  False, and no change, if fewer than `reserve`
        blocks would be left."""
        if num_tokens <= len(table.blocks) * self.block_size:
            return True
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        new = self.pool.allocate(missing) if missing + reserve <= self.pool.num_available else None
        if new is None:
            return False
        table.blocks += new
        return True

    def cache_full_blocks(self, table: BlockTable, tokens: array[int], num_settled: int) -> None:
        """The KV of the first `num_settled` tokens is computed and stays: let its full blocks be found."""
        full = num_settled // self.block_size
        if full <= table.num_full:
            return
        if self.enabled and self.is_current(table):
            self._extend_hashes(table, tokens, full)
            new = []
            for index in range(table.num_full, full):
                if self.pool.cache_block(table.blocks[index], table.hashes[index]):
                    new.append(index)
                self._drop_pending(table, table.hashes[index])
            self._log_stored(table, tokens, new)
            if self.store is not None and new:
                self.store.save(table, tokens, new)
        table.num_full = full

    def _log_stored(self, table: BlockTable, tokens: array[int], indices: Sequence[int]) -> None:
        """These blocks of the table, ascending, can be found now: an event for each run of neighbours."""
        if self.events is None:
            return
        for _, run in groupby(enumerate(indices), key=lambda place: place[1] - place[0]):
            run_indices = [index for _, index in run]
            first, end = run_indices[0], run_indices[-1] + 1
            self.events.stored(
                table.hashes[first - 1] if first else None,
                table.hashes[first:end],
                tokens,
                first * self.block_size,
                variant=table.variant,
                cache_salt=table.cache_salt,
                features=table.features,
            )

    def hold(self, table: BlockTable, count: int) -> BlockTable:
        """A table that holds the first `count` blocks of one that may be free again, as far as they are cached; one
        without blocks need not be freed."""
        held = BlockTable(table.cache_salt, table.variant)
        for block_hash in table.hashes[:count]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            self.pool.ref(block)
            held.blocks.append(block)
        if held.blocks:
            self._tables.add(held)
        return held

    def hold_block(self, block: int) -> BlockTable:
        """A table of its own for a block in use, which stays in use until that is freed."""
        held = BlockTable("")
        self.pool.ref(block)
        held.blocks.append(block)
        self._tables.add(held)
        return held

    # --- blocks that are loaded ---

    def num_unclaimed(self, table: BlockTable, hits: int, most: int) -> int:
        """The number of blocks of the table after the first `hits` that are neither cached nor being computed, at most
        `most`."""
        count = 0
        while count < most:
            block_hash = table.hashes[hits + count]
            if block_hash in self._pending or self.pool.lookup(block_hash) is not None:
                break
            count += 1
        return count

    def begin_load(self, table: BlockTable, hits: int, count: int) -> BlockTable:
        """The `count` blocks after the first `hits` of a request that waits are pending from here on, for the table
        that is returned; it has no blocks yet."""
        loading = BlockTable(table.cache_salt, table.variant, table.features)
        loading.hashes, loading.hash_seed = table.hashes[: hits + count], table.hash_seed
        loading.num_full = hits
        self._tables.add(loading)
        for block_hash in loading.hashes[hits:]:
            self._pending.setdefault(block_hash, loading)
        return loading

    def is_current(self, table: BlockTable) -> bool:
        """Whether neither the cache was reset nor the variant replaced since the table's hashes were made."""
        return table.hash_seed == self._hash_seed(table)

    def place_load(self, loading: BlockTable) -> list[int] | None:
        """Blocks for what is loaded, and a hold on those before them; None: there is no room, or they are gone.  One
        block for every running request stays available."""
        if not self.is_current(loading):
            return None
        before = [self.pool.lookup(block_hash) for block_hash in loading.hashes[: loading.num_full]]
        known = [block for block in before if block is not None]
        count = len(loading.hashes) - loading.num_full
        unused = sum(not self.pool.is_in_use(block) for block in known)
        if len(known) < len(before) or count + unused + len(self._tables) > self.pool.num_available:
            return None
        for block in known:
            self.pool.ref(block)
        new = self.pool.allocate(count)
        assert new is not None
        loading.blocks = known + new
        return new

    def shorten_load(self, loading: BlockTable, count: int) -> None:
        """Only the first `count` blocks come."""
        end = loading.num_full + count
        for block_hash in loading.hashes[end:]:
            self._drop_pending(loading, block_hash)
        del loading.hashes[end:]

    def end_load(self, loading: BlockTable, tokens: array[int], count: int) -> None:
        """The first `count` of its blocks are loaded: let them be found, and nothing be held any more."""
        if count and self.is_current(loading):
            first = loading.num_full
            indices = range(first, first + count)
            new = [index for index in indices if self.pool.cache_block(loading.blocks[index], loading.hashes[index])]
            self._log_stored(loading, tokens, new)
        self.free(loading)

    def free(self, table: BlockTable) -> None:
        """The request stopped running: release its blocks, tail first, and what others waited for."""
        for block_hash in table.hashes[table.num_full :]:
            self._drop_pending(table, block_hash)
        self.pool.release(table.blocks)
        self._tables.discard(table)
        table.blocks = []

    def reset(self) -> None:
        """Let nothing computed so far be found, including blocks that running requests have begun."""
        self._generation += 1
        self._pending.clear()
        self.pool.clear()
        if self.events is not None:
            self.events.cleared()
        for part in (self.store, self.transfers):
            if part is not None:
                part.on_reset()
        if self.snapshots is not None:
            self.snapshots.clear()

    def set_epoch(self, epoch: int) -> None:
        """Other weights compute from here on: blocks of earlier epochs are never found."""
        self._epoch = epoch
        self.reset()

    def on_variant_replaced(self, variant: Variant) -> None:
        """The variant has a new generation: blocks begun with the old one are not waited for."""
        self._pending = {
            block_hash: table for block_hash, table in self._pending.items() if table.variant is not variant
        }

    def check(self) -> None:
        """Raise `CacheBroken` if blocks were lost, allocated twice, or are pending for a request that does not run."""
        self.pool.check(table.blocks for table in self._tables)
        if not self._tables.issuperset(self._pending.values()):
            raise CacheBroken("a block is pending for a request that does not run")
        if self.snapshots is not None:
            self.snapshots.check()

    def check_idle(self) -> None:
        """Raise `CacheBroken` if any block is in use or pending; cheap, for when nothing runs."""
        if self._tables or self._pending or self.pool.num_in_use:
            raise CacheBroken(f"nothing runs, but {self.pool.num_in_use} blocks are in use")
        if self.snapshots is not None:
            self.snapshots.check_idle()

    def _drop_pending(self, table: BlockTable, block_hash: bytes) -> None:
        if self._pending.get(block_hash) is table:
            del self._pending[block_hash]

    def _extend_hashes(self, table: BlockTable, tokens: array[int], count: int) -> None:
        """Bring the chain to `count` hashes; begin anew if the cache was reset, or the variant replaced."""
        seed = self._hash_seed(table)
        if table.hash_seed != seed:
            table.hash_seed = seed
            table.hashes = []
        hashes, size = table.hashes, self.block_size
        last = hashes[-1] if hashes else self._root(table)
        for index in range(len(hashes), count):
            start, end = index * size, (index + 1) * size
            content = tokens[start:end].tobytes()
            if table.features:
                content += features_key(table.features, start, end)
            last = hashlib.blake2b(last + content, digest_size=32, key=self._key).digest()
            hashes.append(last)

    def _hash_seed(self, table: BlockTable) -> tuple[int, int]:
        return self._generation, 0 if table.variant is None else table.variant.generation

    def _root(self, table: BlockTable) -> bytes:
        variant = table.variant
        names = ("", 0) if variant is None else (variant.name, variant.generation)
        root = msgspec.msgpack.encode((self._model, self._epoch, *names, table.cache_salt, self._generation))
        return hashlib.blake2b(root, digest_size=32, key=self._key).digest()
