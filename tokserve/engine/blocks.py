"""The pages of the KV cache as a pool: who holds which, what each contains, and which to give away next.

A block is held (some request's table names it), cached (nobody holds it, but its content can be found by
digest) or empty.  New blocks come from the empty ones first, then from the cached ones, least recently
released first.  This file knows no tokens and no requests: a digest is an opaque key.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class CacheBroken(RuntimeError):
    """The bookkeeping of the KV cache contradicts itself: a bug."""


@dataclass(slots=True, eq=False)
class Block:
    """One page: how many tables name it, and the digest its content is indexed under (None: not indexed)."""

    id: int
    refs: int = 0
    digest: bytes | None = None


class BlockPool:
    """All blocks; `num_empty + num_cached + num_held == total` at any time."""

    def __init__(self, total: int) -> None:
        self._blocks = [Block(id) for id in range(total)]
        self._empty = list(range(total - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._index: dict[bytes, int] = {}

    @property
    def total(self) -> int:
        """Blocks there are."""
        return len(self._blocks)

    @property
    def num_empty(self) -> int:
        """Blocks that nobody holds and that contain nothing of use."""
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take_new` could give."""
        return len(self._empty) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that at least one table names."""
        return self.total - self.num_available

    def find(self, digest: bytes) -> int | None:
        """The block with this content."""
        return self._index.get(digest)

    def is_held(self, block: int) -> bool:
        """Whether some table names the block."""
        return self._blocks[block].refs > 0

    def take(self, block: int) -> None:
        """Name a found block in one more table."""
        entry = self._blocks[block]
        if entry.refs == 0:
            del self._cached[block]
        entry.refs += 1

    def take_new(self, count: int) -> list[int] | None:
        """`count` blocks for one table, without their old content; None, and no change, if there are too few."""
        if count > self.num_available:
            return None
        return [self._pop() for _ in range(count)]

    def _pop(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(self._blocks[block])
        self._blocks[block].refs = 1
        return block

    def _forget(self, entry: Block) -> None:
        if entry.digest is not None:
            del self._index[entry.digest]
            entry.digest = None

    def release(self, blocks: Sequence[int]) -> None:
        """Give up a table.  Its tail is reused first: a prefix is of use without its tail, not the other way round."""
        for block in reversed(blocks):
            entry = self._blocks[block]
            entry.refs -= 1
            if entry.refs:
                continue
            if entry.digest is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Let a held block be found; without effect if another block already has this content."""
        entry = self._blocks[block]
        if entry.digest is None and digest not in self._index:
            entry.digest = digest
            self._index[digest] = block

    def clear(self) -> None:
        """Let nothing be found any more."""
        for block in self._index.values():
            self._blocks[block].digest = None
        self._index.clear()
        self._empty.extend(self._cached)
        self._cached.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `CacheBroken` unless counts, references and the index agree with each other and with `tables`."""
        refs: Counter[int] = Counter()
        for table in tables:
            refs.update(table)
            if len(set(table)) != len(table):
                raise CacheBroken("a table names a block twice")
        empty = set(self._empty)
        held = indexed = 0
        for block in self._blocks:
            held += block.refs > 0
            indexed += block.digest is not None
            if block.refs != refs[block.id]:
                raise CacheBroken(f"block {block.id} counts {block.refs} references, tables have {refs[block.id]}")
            if (block.id in empty) != (block.refs == 0 and block.digest is None):
                raise CacheBroken(f"block {block.id} should be empty, or should not")
            if (block.id in self._cached) != (block.refs == 0 and block.digest is not None):
                raise CacheBroken(f"block {block.id} should be cached, or should not")
            if block.digest is not None and self._index.get(block.digest) != block.id:
                raise CacheBroken(f"block {block.id} is not found under its digest")
        if indexed != len(self._index):
            raise CacheBroken("the index names a block with other content")
        if len(self._empty) + len(self._cached) + held != self.total:
            raise CacheBroken(f"empty {len(self._empty)} + cached {len(self._cached)} + held {held} != {self.total}")
