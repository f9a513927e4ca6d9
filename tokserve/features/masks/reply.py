"""Sampling masks in the forms of the routes: a list of ids per token, or columns in the formats "arrays" and
"base64"."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.features.masks.columns import NAME, NO_MASKS, Masks
from tokserve.server.replies.fields import Form
from tokserve.server.replies.logprobs import clamped
from tokserve.server.replies.reply_parts import DeferredParts, PartEncoder, encode_list, single_part


class MaskFields(msgspec.Struct, kw_only=True):
    """The fields of a choice whose request has `return_sampling_mask`; the last comes with its end."""

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


class MaskWriter:
    """Writes the masks of tokens, and how many of a choice's tokens had more ids than a mask may have."""

    fields = MaskFields
    of_tokens = ("sampling_mask", "sampling_logprobs", "kept_logprob")

    def tokens(self, column: Column | None, form: Form, parts: DeferredParts | None = None) -> dict[str, Any]:
        masks = Masks.of(column or NO_MASKS)
        if parts is None:
            mask = mask_of(masks, form)
        else:
            encoder = _lists_encoder(masks) if form == "lists" else single_part(lambda: mask_of(masks, form))
            mask = parts.defer(encoder)
        values = (mask, _numbers(masks.logprobs, form), _numbers(masks.kept_logprobs, form))
        return dict(zip(self.of_tokens, values, strict=True))

    def end(self, c: ChoiceOutput, form: Form) -> dict[str, Any]:
        return {"sampling_mask_truncated": c.counts.get(NAME, 0)}


def mask_of(masks: Masks, form: Form) -> Any:
    """The masks of a choice's tokens: [ids or null], `MaskArrays` or `PackedMaskArrays`."""
    if form in ("base64", "packed"):
        return PackedMaskArrays(masks.counts.tobytes(), masks.ids.tobytes())
    counts, ids = masks.counts.tolist(), masks.ids.tolist()
    return MaskArrays(counts, ids) if form == "arrays" else _lists(counts, ids)


def mask_lists(column: Column) -> tuple[list[list[int] | None], list[float]]:
    """The ids of each token, None for all or too many, and its logprobs among them."""
    masks = Masks.of(column)
    return _lists(masks.counts.tolist(), masks.ids.tolist()), clamped(masks.logprobs.tobytes())


def _numbers(column: NDArray[Any], form: Form) -> list[float] | bytes:
    """A column with a value per token."""
    return column.tobytes() if form in ("base64", "packed") else clamped(column.tobytes())


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


def _lists_encoder(masks: Masks) -> PartEncoder:
    counts: list[int] = masks.counts.tolist()
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + max(count, 0))

    def make(begin: int, end: int) -> list[list[int] | None]:
        return _lists(counts[begin:end], masks.ids[ends[begin] : ends[end]].tolist())

    return lambda: encode_list(len(counts), ends[-1] // max(1, len(counts)), make)
