"""The blocks of the KV cache as a pool: reference counts, the index of block hashes, and the order of eviction.

A block is in use (at least one block table names it), cached (no table names it, but its hash finds it) or free.
Allocation takes free blocks first, then cached ones, least recently released first, and those to `keep` last.  A hash
is an opaque key.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


class CacheBroken(RuntimeError):
    """The bookkeeping of the KV cache contradicts itself: a bug."""


@dataclass(slots=True, eq=False)
class Block:
    """One block: how many tables name it, and the hash its content is indexed under (None: not indexed)."""

    id: int
    refs: int = 0
    hash: bytes | None = None


class BlockPool:
    """All blocks: each is free (no table names it and no hash finds it), cached, or in use.  `on_evicted` is called
    with the hash of each block that is allocated anew and so not found any more."""

    def __init__(self, total: int, on_evicted: Callable[[bytes], object] = lambda block_hash: None) -> None:
        self._on_evicted = on_evicted
        self._blocks = [Block(id) for id in range(total)]
        self._free = list(range(total - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._kept: OrderedDict[int, None] = OrderedDict()  # cached ones that are taken last, likewise
        self._keep: set[bytes] = set()
        self._index: dict[bytes, int] = {}

    @property
    def total(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    @property
    def num_cached(self) -> int:
        """Blocks that no table names and whose content can be found."""
        return len(self._cached) + len(self._kept)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could return."""
        return len(self._free) + len(self._cached) + len(self._kept)

    @property
    def num_in_use(self) -> int:
        """Blocks that at least one table names."""
        return self.total - self.num_available

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content."""
        return self._index.get(block_hash)

    def is_in_use(self, block: int) -> bool:
        """Whether a table names the block."""
        return self._blocks[block].refs > 0

    def ref(self, block: int) -> None:
        """Name the block in one more table."""
        entry = self._blocks[block]
        if entry.refs == 0:
            del self._order(entry)[block]
        entry.refs += 1

    def keep(self, block_hash: bytes) -> None:
        """Take the block with this content only when there is no other, from now on."""
        self._move(block_hash, kept=True)

    def keep_no_longer(self, block_hash: bytes) -> None:
        """Take the block with this content like others."""
        self._move(block_hash, kept=False)

    def _move(self, block_hash: bytes, *, kept: bool) -> None:
        block = self._index.get(block_hash)
        waits = block is not None and self._blocks[block].refs == 0
        if block is not None and waits:
            del self._order(self._blocks[block])[block]
        if kept:
            self._keep.add(block_hash)
        else:
            self._keep.discard(block_hash)
        if block is not None and waits:
            self._order(self._blocks[block])[block] = None

    def _order(self, entry: Block) -> OrderedDict[int, None]:
        """Where a block is listed that no table names and a hash finds."""
        return self._kept if entry.hash in self._keep else self._cached

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks for one table, no longer found by their old content; None, and no change, if too few."""
        if count > self.num_available:
            return None
        return [self._pop() for _ in range(count)]

    def _pop(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = (self._cached or self._kept).popitem(last=False)
            self._evict(self._blocks[block])
        self._blocks[block].refs = 1
        return block

    def _evict(self, entry: Block) -> None:
        if entry.hash is not None:
            del self._index[entry.hash]
            self._on_evicted(entry.hash)
            entry.hash = None

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a table's references.  Its tail is evicted first, since a prefix is of use without its tail."""
        for block in reversed(blocks):
            entry = self._blocks[block]
            entry.refs -= 1
            if entry.refs:
                continue
            if entry.hash is None:
                self._free.append(block)
            else:
                self._order(entry)[block] = None

    def cache_block(self, block: int, block_hash: bytes) -> bool:
        """Index a block in use by its hash; False, and no effect, if another one is indexed under it already."""
        entry = self._blocks[block]
        if entry.hash is not None or block_hash in self._index:
            return False
        entry.hash = block_hash
        self._index[block_hash] = block
        return True

    def clear(self) -> None:
        """Empty the index; cached blocks become free, and none is to be kept."""
        for block in self._index.values():
            self._blocks[block].hash = None
        self._index.clear()
        for order in (self._cached, self._kept):
            self._free.extend(order)
            order.clear()
        self._keep.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `CacheBroken` unless counts, references and the index agree with each other and with `tables`."""
        refs: Counter[int] = Counter()
        for table in tables:
            refs.update(table)
            if len(set(table)) != len(table):
                raise CacheBroken("a table names a block twice")
        free = set(self._free)
        in_use = indexed = 0
        for block in self._blocks:
            in_use += block.refs > 0
            indexed += block.hash is not None
            if block.refs != refs[block.id]:
                raise CacheBroken(f"block {block.id} counts {block.refs} references, tables have {refs[block.id]}")
            if (block.id in free) != (block.refs == 0 and block.hash is None):
                raise CacheBroken(f"block {block.id} is wrongly listed as free, or not listed")
            is_cached = block.refs == 0 and block.hash is not None
            listed = [order for order in (self._cached, self._kept) if block.id in order]
            if listed != ([self._order(block)] if is_cached else []):
                raise CacheBroken(f"block {block.id} is wrongly listed as cached, or not listed")
            if block.hash is not None and self._index.get(block.hash) != block.id:
                raise CacheBroken(f"block {block.id} is not indexed under its hash")
        if indexed != len(self._index):
            raise CacheBroken("the index names a block with other content")
        if len(self._free) + self.num_cached + in_use != self.total:
            raise CacheBroken(f"free {len(self._free)} + cached {self.num_cached} + in use {in_use} != {self.total}")
