"""What a caller gives to be scored: checked, and turned into the items of a batch."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.protocol.params import LOGPROBS_MODES, SamplingParams
from tokserve.train.layers.adjustments import AdjustedRow, Adjustment, adjustment_of
from tokserve.train.scores import Items
from tokserve.train.tree import Int32, Packing

Mask = Sequence[int] | None
Masks = Sequence[Mask] | Mapping[str, Any]  # a list by token, or columns
Params = Sequence[Mapping[str, Any] | SamplingParams | None]


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A sequence whose tokens from `start` on are scored."""

    tokens: Int32
    start: int
    temperature: float
    masks: list[NDArray[np.int64] | None] | None  # by scored token; None: no token has one
    adjustment: Adjustment | None = None


def check_mode(logprobs_mode: str) -> None:
    if logprobs_mode not in LOGPROBS_MODES:
        raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {logprobs_mode!r}")


def checked(
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    temperature: float | Sequence[float],
    logprobs_mode: str,
    sampling_masks: Sequence[Masks | None] | None,
    sampling_params: Params | None,
    *,
    vocab: int,
    positions: int,
) -> list[ScoringRequest]:
    """One request a sequence; masks and parameters count in the mode "processed".  Raises ValueError that names the
    argument and the index."""
    check_mode(logprobs_mode)
    if logprobs_mode != "processed":
        sampling_masks = sampling_params = None
    count = len(sequences)
    numbers = np.asarray(temperature, np.float64)
    temperatures = [float(numbers)] * count if numbers.ndim == 0 else numbers.tolist()
    masks = [None] * count if sampling_masks is None else list(sampling_masks)
    params = [None] * count if sampling_params is None else list(sampling_params)
    named = {"starts": starts, "temperature": temperatures, "sampling_masks": masks, "sampling_params": params}
    for name, values in named.items():
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} sequences")
    requests = [
        _request(number, *values, vocab, positions)
        for number, values in enumerate(zip(sequences, starts, temperatures, masks, strict=True))
    ]
    return [
        replace(
            request,
            adjustment=adjustment_of(number, task, request.temperature, masked=request.masks is not None, vocab=vocab),
        )
        for number, (request, task) in enumerate(zip(requests, params, strict=True))
    ]


def _request(
    number: int,
    sequence: Sequence[int],
    start: int,
    temperature: float,
    masks: Masks | None,
    vocab: int,
    positions: int,
) -> ScoringRequest:
    tokens = np.asarray(sequence)
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise ValueError(f"sequences[{number}] must be a list of at least one token id")
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise ValueError(f"sequences[{number}] holds an id outside the vocabulary of {vocab}")
    if len(tokens) - 1 > positions:
        raise ValueError(f"sequences[{number}] has {len(tokens)} tokens; the model has {positions} positions")
    if not 1 <= start <= len(tokens):
        raise ValueError(f"starts[{number}] must be between 1 and {len(tokens)}, got {start}")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive number, got {temperature} for sequences[{number}]")
    if isinstance(masks, Mapping):
        masks = _from_columns(number, masks)
    kept = None if masks is None else _masks(number, tokens[start:], masks, vocab)
    return ScoringRequest(tokens.astype(np.int32), int(start), float(temperature), kept)


def _from_columns(number: int, columns: Mapping[str, Any]) -> list[Mask]:
    """The ids by token, from `counts` and `ids` as the token route has them: lists, or int32 as bytes or base64.  A
    negative count is a row without a mask."""
    counts, ids = (_int32(columns.get(name), f"sampling_masks[{number}].{name}") for name in ("counts", "ids"))
    ends = np.maximum(counts, 0).cumsum()
    if len(ids) != (ends[-1] if len(ends) else 0):
        raise ValueError(f"sampling_masks[{number}] has {len(ids)} ids, and its counts say otherwise")
    parts = np.split(ids, ends)[:-1]
    return [None if count < 0 else part.tolist() for count, part in zip(counts.tolist(), parts, strict=True)]


def _int32(value: Any, name: str) -> NDArray[np.int32]:
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, "<i4")
    if value is None:
        raise ValueError(f"{name} is missing")
    return np.asarray(value, np.int32)


def _masks(
    number: int, scored: NDArray[np.integer], masks: Sequence[Mask], vocab: int
) -> list[NDArray[np.int64] | None]:
    if len(masks) != len(scored):
        raise ValueError(f"sampling_masks[{number}] has {len(masks)} entries for {len(scored)} scored tokens")
    rows: list[NDArray[np.int64] | None] = []
    for index, (token, mask) in enumerate(zip(scored.tolist(), masks, strict=True)):
        ids = None if mask is None else np.unique(np.asarray(mask, np.int64))
        if ids is not None:
            if ids.size == 0 or ids[0] < 0 or ids[-1] >= vocab:
                raise ValueError(f"sampling_masks[{number}][{index}] must hold ids of the vocabulary of {vocab}")
            if token not in ids:
                raise ValueError(f"sampling_masks[{number}][{index}] lacks {token}, the token that was drawn")
        rows.append(ids)
    return rows


def items_of(
    requests: Sequence[ScoringRequest], packing: Packing, mode: str, device: torch.device
) -> tuple[Tensor, Items, list[Tensor]]:
    """Tokens of the batch whose hidden states are needed [m], what is scored of them, and where each request's are.
    What several requests score alike (a token after the same prefix, at one temperature, with one mask) is one item."""
    numbers: dict[tuple[int, int, float, bytes | None, int], int] = {}
    masks: list[NDArray[np.int64] | None] = []
    adjusted: list[AdjustedRow | None] = []
    members: list[list[int]] = []
    for which, (request, index) in enumerate(zip(requests, packing.index, strict=True)):
        numbered, adjustment = [], request.adjustment
        for offset, position in enumerate(range(request.start, len(request.tokens))):
            mask = None if request.masks is None else request.masks[offset]
            key = (
                int(index[position - 1]),
                int(request.tokens[position]),
                request.temperature,
                None if mask is None else mask.tobytes(),
                -1 if adjustment is None else which,
            )
            if key not in numbers:
                numbers[key] = len(masks)
                masks.append(mask)
                history = request.tokens[:position]
                adjusted.append(None if adjustment is None else AdjustedRow(adjustment, history, request.start))
            numbered.append(numbers[key])
        members.append(numbered)
    keys = list(numbers)
    ascending = sorted(range(len(keys)), key=lambda number: keys[number][0])  # stable
    rank = np.empty(len(keys), np.int64)
    rank[ascending] = np.arange(len(keys))
    tokens, rows = np.unique(np.array([keys[number][0] for number in ascending], np.int64), return_inverse=True)
    items = Items(
        rows=torch.from_numpy(rows.astype(np.int64)).to(device),
        token_ids=torch.tensor([keys[number][1] for number in ascending], dtype=torch.int64, device=device),
        temperatures=torch.tensor([keys[number][2] for number in ascending], dtype=torch.float32, device=device),
        mode=mode,
        masks=[_tensor(masks[number], device) for number in ascending] if any(m is not None for m in masks) else [],
        adjusted=[adjusted[number] for number in ascending] if any(row is not None for row in adjusted) else [],
    )
    return (
        torch.from_numpy(tokens).to(device),
        items,
        [torch.from_numpy(rank[np.array(numbered, np.int64)]).to(device) for numbered in members],
    )


def _tensor(ids: NDArray[np.int64] | None, device: torch.device) -> Tensor | None:
    return None if ids is None else torch.from_numpy(ids).to(device)
