"""Keys of full KV blocks that mean the same in every process: a chain of hashes over all that a block's content is
computed from.

The chain begins with the identity (model, weights, layout and arithmetic, as the device says them), the weights of the
adapter and the cache salt, and covers tokens and features.  Unlike the prefix cache's hashes, keys have no secret and
no epoch in them: equal keys mean equal bytes, and other weights have other keys.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping

import msgspec

from tokserve.engine.kv_cache.block_table import BlockTable, features_key

KEY_BYTES = 32


def identity_of(parts: Mapping[str, str]) -> bytes:
    """One digest for all parts of an identity."""
    return hashlib.sha256(msgspec.msgpack.encode(sorted(parts.items()))).digest()


def content_keys(identity: bytes, table: BlockTable, tokens: array[int], count: int, block_size: int) -> list[bytes]:
    """Keys of the first `count` full blocks of a table whose hashes are current; none if the adapter's weights are not
    known."""
    variant = table.variant
    if variant is not None and not variant.digest:
        return []
    seed = (identity, *table.hash_seed)
    if table.keys_seed != seed:
        table.keys_seed, table.keys = seed, []
    keys = table.keys
    if keys:
        last = keys[-1]
    else:
        root = (identity, "" if variant is None else variant.digest, table.cache_salt)
        last = hashlib.blake2b(msgspec.msgpack.encode(root), digest_size=KEY_BYTES).digest()
    for index in range(len(keys), count):
        start, end = index * block_size, (index + 1) * block_size
        content = tokens[start:end].tobytes()
        if table.features:
            content += features_key(table.features, start, end)
        last = hashlib.blake2b(last + content, digest_size=KEY_BYTES).digest()
        keys.append(last)
    return keys[:count]
