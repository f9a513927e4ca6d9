"""A prompt: packed token ids, and features that take the place of runs of placeholder ids."""

from __future__ import annotations

import msgspec


class Feature(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Encoder output, or an encoder's input, in the place of `length` placeholder ids from position `start` on.

    `kind` names who turns `data` into embeddings; "embeddings": `data` is float32 [length, hidden], little-endian.
    `hash` names the content: equal hashes are equal data.
    """

    kind: str
    hash: bytes
    start: int
    length: int
    data: bytes


class TokenPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`ids`: packed little-endian int32.  `features` are in order and do not overlap."""

    ids: bytes
    features: tuple[Feature, ...] = ()
