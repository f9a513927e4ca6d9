"""A prompt: packed token ids, and features that take the place of runs of placeholder ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tokserve.base.errors import RequestError


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Little-endian int32 bytes as a list of ints."""
    return memoryview(packed).cast("i").tolist()


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
    """`ids`: packed little-endian int32.  `features` are in order and do not overlap.  `second`: of a pair, the
    position from which on ids are of the second text; -1: there is one text."""

    ids: bytes
    features: tuple[Feature, ...] = ()
    second: int = -1


def without_content(prompt: TokenPrompt) -> TokenPrompt:
    """The prompt for a second choice of it: its features are named, and have no data."""
    if not prompt.features:
        return prompt
    features = tuple(msgspec.structs.replace(feature, data=b"") for feature in prompt.features)
    return msgspec.structs.replace(prompt, features=features)


def check_features(features: Sequence[Feature], num_tokens: int, bytes_per_id: Mapping[str, int]) -> None:
    """Raise RequestError unless the features lie in a prompt of so many tokens, in order and apart, and are of known
    kinds.  `bytes_per_id`: by kind, bytes of data for each placeholder id; 0: any."""
    end = 0
    for feature in features:
        if feature.kind not in bytes_per_id:
            known = ", ".join(bytes_per_id) or "none"
            raise RequestError(f"features of kind {feature.kind!r} are not supported; known: {known}", field="features")
        last = feature.start + feature.length
        if feature.length < 1 or feature.start < end or last > num_tokens:
            where = f"positions {feature.start} to {last - 1} of {num_tokens}"
            raise RequestError(f"features must be in order, apart and within the prompt, got {where}", field="features")
        needed = feature.length * bytes_per_id[feature.kind]
        if needed and len(feature.data) != needed:
            raise RequestError(
                f"a feature of kind {feature.kind!r} and length {feature.length} needs {needed} bytes of data, "
                f"got {len(feature.data)}",
                field="features",
            )
        end = last
