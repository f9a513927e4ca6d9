"""The blocks of one request, and what their hashes are made of."""

from __future__ import annotations

import msgspec

from tokserve.engine.variant import Variant
from tokserve.protocol.prompt import Feature


class BlockTable:
    """The blocks of one request in order of position, and the chain of hashes of its full blocks.

    `blocks` is empty while the request does not run.  The first `num_full` of them are computed and indexed,
    and the device knows the first `num_sent`.
    `awaited`: the hash of a block that another request was computing, or that was being loaded, at the last lookup.
    `prompt_blocks`: full blocks of what was known when the request began to run.  `keys`: as `content_keys` made them.
    `may_load`: blocks may be loaded from a store for it, which is tried once each time that it waits for a slot.
    """

    __slots__ = (
        "awaited",
        "blocks",
        "cache_salt",
        "features",
        "hash_seed",
        "hashes",
        "keys",
        "keys_seed",
        "may_load",
        "num_full",
        "num_sent",
        "prompt_blocks",
        "variant",
    )

    def __init__(self, cache_salt: str, variant: Variant | None = None, features: tuple[Feature, ...] = ()) -> None:
        self.cache_salt = cache_salt
        self.variant = variant
        self.features = features
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.num_full = self.num_sent = self.prompt_blocks = 0
        self.hash_seed = (-1, 0)  # generations of the cache and of the variant that the hashes belong to
        self.awaited: bytes | None = None
        self.keys: list[bytes] = []
        self.keys_seed: tuple[bytes, int, int] = (b"", -1, 0)
        self.may_load = True


def features_key(features: tuple[Feature, ...], start: int, end: int) -> bytes:
    """What the features that overlap positions `start` to `end` - 1 add to a block's hash."""
    overlapping = [
        (feature.kind, feature.hash, start - feature.start)
        for feature in features
        if feature.start < end and start < feature.start + feature.length
    ]
    return msgspec.msgpack.encode(overlapping) if overlapping else b""
