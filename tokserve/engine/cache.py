"""The prefix cache over the block pool: which blocks a request's tokens can reuse, and the tables of those that run.

The content of a full block is named by a chained hash of all tokens up to its end.  The chain begins with
model, weight epoch, adapter and cache salt, and is keyed with a secret of this process, so that neither
stale weights nor another tenant's text can be hit, not even on purpose.  Knows tokens and blocks; knows nothing of
slots, steps or order.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array

import msgspec

from tokserve.engine.adapter import Adapter
from tokserve.engine.blocks import BlockPool, CacheBroken


class Table:
    """The blocks of one request in order of position, and the chain of digests of its full blocks.

    `blocks` is empty while the request does not run.  The first `settled` of them have been computed and
    offered to the index.  `waits_for`: the digest of a block that another request was computing when this one
    was last looked at.
    """

    __slots__ = ("adapter", "blocks", "digests", "origin", "salt", "settled", "waits_for")

    def __init__(self, salt: str, adapter: Adapter | None = None) -> None:
        self.salt = salt
        self.adapter = adapter
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        self.settled = 0
        self.origin = (-1, 0)  # generations of the cache and of the adapter that the digests belong to
        self.waits_for: bytes | None = None


class Cache:
    """Tables over a `BlockPool`; with `enabled` False every block starts empty."""

    def __init__(self, num_blocks: int, block_size: int, *, enabled: bool, model: str, epoch: int = 0) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._enabled = enabled
        self._model, self._epoch = model, epoch
        self._key = secrets.token_bytes(32)
        self._generation = 0
        self._tables: set[Table] = set()
        self._promises: dict[bytes, Table] = {}

    @property
    def enabled(self) -> bool:
        """Whether blocks are found again."""
        return self._enabled

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def find(self, table: Table, tokens: array[int], usable: int) -> int | None:
        """How many leading blocks, at most `usable`, can be taken from the cache.

        None: the first one missing is being computed for another request; wait for it.
        """
        if not self._enabled:
            return 0
        self._extend(table, tokens, usable)
        hits = 0
        while hits < usable and self.pool.find(table.digests[hits]) is not None:
            hits += 1
        table.waits_for = None
        if hits < usable and table.digests[hits] in self._promises:
            table.waits_for = table.digests[hits]
            return None
        return hits

    def must_wait(self, table: Table) -> bool:
        """Whether what `find` said to wait for is still being computed."""
        return table.waits_for is not None and table.waits_for in self._promises

    def admit(self, table: Table, tokens: array[int], hits: int, spare: int) -> bool:
        """Give `table` its first `hits` blocks from the cache and new ones for the rest of `tokens`.

        False, and no change, if that would leave fewer than `spare` blocks.  The blocks to be computed are promised
        to others with the same prefix until they are settled or freed.
        """
        found = self._found(table, hits)
        idle = sum(not self.pool.is_held(block) for block in found)
        missing = self.blocks_for(len(tokens)) - hits
        if missing + idle + spare > self.pool.num_available:
            return False
        for block in found:
            self.pool.take(block)
        fresh = self.pool.take_new(missing)
        assert fresh is not None
        table.blocks = found + fresh
        table.settled = hits
        self._tables.add(table)
        if self._enabled:
            full = len(tokens) // self.block_size
            self._extend(table, tokens, full)
            for digest in table.digests[hits:full]:
                if self.pool.find(digest) is None:
                    self._promises.setdefault(digest, table)
        return True

    def _found(self, table: Table, hits: int) -> list[int]:
        found = [self.pool.find(digest) for digest in table.digests[:hits]]
        assert None not in found
        return [block for block in found if block is not None]

    def grow(self, table: Table, num_tokens: int) -> bool:
        """Make room for `num_tokens` in a running request's table; False, and no change, if there is none."""
        if num_tokens <= len(table.blocks) * self.block_size:
            return True
        fresh = self.pool.take_new(self.blocks_for(num_tokens) - len(table.blocks))
        if fresh is None:
            return False
        table.blocks += fresh
        return True

    def settle(self, table: Table, tokens: array[int], num_computed: int) -> None:
        """The KV of the first `num_computed` tokens has been computed: let its full blocks be found."""
        full = num_computed // self.block_size
        if full <= table.settled:
            return
        if self._enabled and table.origin == self._origin(table):
            self._extend(table, tokens, full)
            for index in range(table.settled, full):
                self.pool.publish(table.blocks[index], table.digests[index])
                self._withdraw(table, table.digests[index])
        table.settled = full

    def free(self, table: Table) -> None:
        """The request runs no more: give up its blocks, tail first, and what it promised."""
        for digest in table.digests[table.settled :]:
            self._withdraw(table, digest)
        self.pool.release(table.blocks)
        self._tables.discard(table)
        table.blocks = []

    def reset(self) -> None:
        """Let nothing computed so far be found, including what running requests have begun."""
        self._generation += 1
        self._promises.clear()
        self.pool.clear()

    def renew(self, epoch: int) -> None:
        """From here on other weights compute: blocks of earlier epochs are never found."""
        self._epoch = epoch
        self.reset()

    def replaced(self, adapter: Adapter) -> None:
        """The adapter has a new generation: what running requests have begun with the old one is never found."""
        self._promises = {digest: table for digest, table in self._promises.items() if table.adapter is not adapter}

    def check(self) -> None:
        """Raise `CacheBroken` if blocks were lost, given twice, or promised by nobody."""
        self.pool.check(table.blocks for table in self._tables)
        if not self._tables.issuperset(self._promises.values()):
            raise CacheBroken("a block is promised by a request that does not run")

    def check_idle(self) -> None:
        """Raise `CacheBroken` if anything is held or promised; cheap, for when nothing runs."""
        if self._tables or self._promises or self.pool.num_held:
            raise CacheBroken(f"nothing runs, but {self.pool.num_held} blocks are held")

    def _withdraw(self, table: Table, digest: bytes) -> None:
        if self._promises.get(digest) is table:
            del self._promises[digest]

    def _extend(self, table: Table, tokens: array[int], count: int) -> None:
        """Bring the chain of digests to `count` blocks; begin anew if the cache was reset, or the adapter replaced."""
        origin = self._origin(table)
        if table.origin != origin:
            table.origin = origin
            table.digests = []
        digests, size = table.digests, self.block_size
        last = digests[-1] if digests else self._root(table.salt, table.adapter)
        for index in range(len(digests), count):
            content = tokens[index * size : (index + 1) * size].tobytes()
            last = hashlib.blake2b(last + content, digest_size=32, key=self._key).digest()
            digests.append(last)

    def _origin(self, table: Table) -> tuple[int, int]:
        return self._generation, 0 if table.adapter is None else table.adapter.generation

    def _root(self, salt: str, adapter: Adapter | None = None) -> bytes:
        which = ("", 0) if adapter is None else (adapter.name, adapter.generation)
        origin = msgspec.msgpack.encode((self._model, self._epoch, *which, salt, self._generation))
        return hashlib.blake2b(origin, digest_size=32, key=self._key).digest()
