"""Sampling masks in the forms of the routes: what each token of a choice was drawn from.

The engine's columns (`SamplingMasks`) become a list of ids per token, or stay columns in the formats "arrays" and
"base64".
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from tokserve.client.outputs import ChoiceOutput, SamplingMasks
from tokserve.server.replies.logprobs import clamped
from tokserve.server.replies.reply_parts import DeferredParts, PartEncoder, encode_list, single_part

NO_MASKS = SamplingMasks()
Form = Literal["lists", "arrays", "packed"]


class MaskFields(msgspec.Struct, kw_only=True):
    """The fields of a choice, or of a delta of one, if its request has `return_sampling_mask`; the last comes with its
    end."""

    sampling_mask: Any = UNSET
    sampling_logprobs: list[float] | bytes | UnsetType = UNSET
    kept_logprob: list[float] | bytes | UnsetType = UNSET
    sampling_mask_truncated: int | UnsetType = UNSET


class MaskArrays(msgspec.Struct):
    """Format "arrays".  A negative count has no ids: -1 is the whole vocabulary, -2 more ids than a mask may have."""

    counts: list[int]
    ids: list[int]


class PackedMaskArrays(msgspec.Struct):
    """The same as little-endian int32: base64 in JSON, byte strings in msgpack."""

    counts: bytes
    ids: bytes


def add(choice: MaskFields, c: ChoiceOutput, form: Form, parts: DeferredParts | None = None) -> None:
    """Fill in the fields of a choice; with `parts`, the masks are made later."""
    masks = c.sampling_masks or NO_MASKS
    if parts is None:
        choice.sampling_mask = mask_of(masks, form)
    else:
        encoder = _lists_encoder(masks) if form == "lists" else single_part(lambda: mask_of(masks, form))
        choice.sampling_mask = parts.defer(encoder)
    choice.sampling_logprobs = logprobs_of(masks.logprobs, form)
    choice.kept_logprob = logprobs_of(masks.kept_logprobs, form)
    if c.finish_reason is not None:
        choice.sampling_mask_truncated = c.sampling_mask_truncated


def mask_of(masks: SamplingMasks, form: Form) -> list[list[int] | None] | MaskArrays | PackedMaskArrays:
    """The masks of a choice's tokens."""
    if form == "packed":
        return PackedMaskArrays(masks.counts.tobytes(), masks.ids)
    counts, ids = masks.counts.tolist(), _ints(masks.ids)
    return MaskArrays(counts, ids) if form == "arrays" else _lists(counts, ids)


def logprobs_of(column: NDArray[np.float32], form: Form) -> list[float] | bytes:
    """A column with a value per token."""
    return column.tobytes() if form == "packed" else clamped(column.tobytes())


def num_bytes(masks: SamplingMasks | None) -> int:
    """The size of the columns."""
    return 0 if masks is None else len(masks.ids) + len(masks.rows)


def _ints(column: bytes) -> list[int]:
    return memoryview(column).cast("i").tolist()


def _lists(counts: list[int], ids: list[int]) -> list[list[int] | None]:
    rows: list[list[int] | None] = []
    end = 0
    for count in counts:
        if count < 0:
            rows.append(None)
        else:
            start, end = end, end + count
            rows.append(ids[start:end])
    return rows


def _lists_encoder(masks: SamplingMasks) -> PartEncoder:
    counts: list[int] = masks.counts.tolist()
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + max(count, 0))

    def make(begin: int, end: int) -> list[list[int] | None]:
        return _lists(counts[begin:end], _ints(masks.ids[4 * ends[begin] : 4 * ends[end]]))

    return lambda: encode_list(len(counts), ends[-1] // max(1, len(counts)), make)
