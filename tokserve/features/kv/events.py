"""KV events: which blocks can be found in the prefix cache from now on, and which no longer, in vLLM's form.

A subscriber that applies all batches in order has the set of cached blocks.  A hash is the last 8 bytes of a block's
hash as an integer; it means nothing outside of these events, since chains are keyed with a secret of the process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from tokserve.engine.variant import Variant
from tokserve.protocol.kv_spec import KVLayout
from tokserve.protocol.prompt import Feature

MEDIUM = "GPU"  # vLLM's name for the memory that steps read, on whatever device
GROUP = 0  # a block holds all layers, which is one of vLLM's groups
NUM_POSITIONAL = 8  # fields of a `BlockStored` in the array form, which ends with `extra_keys`


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that follow one another.  `extra_keys`: of each block, what its hash covers besides tokens.
    `kv_cache_spec_kind`: see `spec_kind`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks whose memory has other content now."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No block is found from here on."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def external(block_hash: bytes) -> int:
    """A block's hash as events have it."""
    return int.from_bytes(block_hash[-8:], "big")


def spec_kind(layout: KVLayout) -> str:
    """vLLM's name for what the blocks hold.  Attention that is limited to a window reads blocks of all tokens, too."""
    return "mla_attention" if any(spec.kind == "latent" for spec in layout.specs) else "full_attention"


class EventLog:
    """What has happened since the last `take`.  `block_size`: tokens.  `kind`: of the blocks, see `spec_kind`."""

    def __init__(self, block_size: int, kind: str) -> None:
        self.block_size = block_size
        self._kind = kind
        self._events: list[Event] = []

    def stored(
        self,
        parent: bytes | None,
        hashes: Sequence[bytes],
        tokens: array[int],
        start: int,
        *,
        variant: Variant | None = None,
        cache_salt: str = "",
        features: Sequence[Feature] = (),
    ) -> None:
        """Blocks of the tokens from position `start` on can be found."""
        self.add(
            self.described(parent, hashes, tokens, start, variant=variant, cache_salt=cache_salt, features=features)
        )

    def add(self, event: Event) -> None:
        """An event that was made elsewhere."""
        self._events.append(event)

    def described(
        self,
        parent: bytes | None,
        hashes: Sequence[bytes],
        tokens: array[int],
        start: int,
        *,
        variant: Variant | None = None,
        cache_salt: str = "",
        features: Sequence[Feature] = (),
    ) -> BlockStored:
        """The event that tells of blocks of the tokens from position `start` on, in the memory that steps read."""
        size = self.block_size
        extra = [
            _extra_keys(position, position + size, variant, cache_salt, features)
            for position in range(start, start + len(hashes) * size, size)
        ]
        return BlockStored(
            [external(block_hash) for block_hash in hashes],
            None if parent is None else external(parent),
            tokens[start : start + len(hashes) * size].tolist(),
            size,
            None if variant is None else variant.generation,
            MEDIUM,
            None if variant is None else variant.name,
            extra if any(extra) else None,
            GROUP,
            self._kind,
        )

    def removed(self, block_hash: bytes) -> None:
        """A block cannot be found any more."""
        self.removed_hash(external(block_hash), MEDIUM)

    def removed_hash(self, block_hash: int, medium: str) -> None:
        """Record the removal of a block from a medium, by its hash."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], medium, GROUP))

    def cleared(self) -> None:
        """No block can be found any more."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events


def _extra_keys(
    start: int, end: int, variant: Variant | None, cache_salt: str, features: Sequence[Feature]
) -> tuple[Any, ...] | None:
    """What the hash of the block of positions `start` to `end` - 1 covers besides its tokens and the block before."""
    keys: list[Any] = [] if variant is None else [variant.name]
    keys += [
        (feature.hash.hex(), feature.start - start)
        for feature in features
        if feature.start < end and start < feature.start + feature.length
    ]
    if start == 0 and cache_salt:
        keys.append(cache_salt)
    return tuple(keys) or None


def plain(event: Event) -> list[Any]:
    """An event as an array: its type, then its fields, as vLLM before 0.24 has them; optional fields are left out."""
    fields = list(msgspec.structs.astuple(event))
    if isinstance(event, BlockStored):
        fields = fields[: NUM_POSITIONAL - (event.extra_keys is None)]
    elif isinstance(event, BlockRemoved):
        fields = fields[:-1]
    return [type(event).__name__, *fields]
