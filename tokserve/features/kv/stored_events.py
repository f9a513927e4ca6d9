"""KV events of the KV store: which blocks it keeps in memory (medium CPU) and in files (STORAGE).

Files that were there at the start are not told of, as their tokens are not known, and after a reset of the prefix
cache, which tells subscribers to forget everything, only what is kept from then on is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

from tokserve.engine.kv_cache.block_table import BlockTable
from tokserve.features.kv.events import BlockStored, EventLog

MEMORY, FILES = "CPU", "STORAGE"


class StoredEvents:
    """`log`: None if there are no events."""

    def __init__(self, log: EventLog | None) -> None:
        self._log = log
        self._blocks: dict[bytes, BlockStored] = {}  # by key
        self._media: dict[bytes, set[str]] = {}

    def describe(self, table: BlockTable, tokens: array[int], indices: Sequence[int], keys: Sequence[bytes]) -> None:
        if self._log is None:
            return
        for index, key in zip(indices, keys, strict=True):
            parent = table.hashes[index - 1] if index else None
            self._blocks[key] = self._log.described(
                parent,
                table.hashes[index : index + 1],
                tokens,
                index * self._log.block_size,
                variant=table.variant,
                cache_salt=table.cache_salt,
                features=table.features,
            )

    def in_memory(self, keys: Iterable[bytes]) -> None:
        """These blocks are kept in memory."""
        self._add(keys, MEMORY)

    def in_files(self, keys: Iterable[bytes]) -> None:
        """These blocks are kept as files."""
        self._add(keys, FILES)

    def _add(self, keys: Iterable[bytes], medium: str) -> None:
        if self._log is None:
            return
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                self._media.setdefault(key, set()).add(medium)
                self._log.add(msgspec.structs.replace(block, medium=medium))

    def left_memory(self, key: bytes) -> None:
        """The block is not in memory any more."""
        self._remove(key, MEMORY)

    def left_files(self, key: bytes) -> None:
        """The block's file is deleted."""
        self._remove(key, FILES)

    def _remove(self, key: bytes, medium: str) -> None:
        media = self._media.get(key, set())
        if self._log is None or medium not in media:
            return
        self._log.removed_hash(self._blocks[key].block_hashes[0], medium)
        media.discard(medium)
        if not media:
            del self._media[key], self._blocks[key]

    def cleared(self) -> None:
        """Tell subscribers to forget all blocks."""
        self._blocks.clear()
        self._media.clear()
