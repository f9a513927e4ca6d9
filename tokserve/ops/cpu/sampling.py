"""The C++ implementations of the ops on logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import sampling


@sampling.sample.implement("cpp", device="cpu")
def sample(logits: Tensor, *rest: Tensor) -> Tensor:
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    _C.sample(logits, *rest, ids)
    return ids


@sampling.sample_fused.implement("cpp", device="cpu")
def sample_fused(
    logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor, temperature: Tensor | None, scaled: bool, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    ids, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    columns = _NO_LOGPROBS if k < 0 else _logprob_columns(rows, k)
    _C.sample_fused(logits, seeds, positions, greedy, temperature, scaled, k, ids, finite, *columns)
    return ids, finite, *columns


def _logprob_columns(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs: the tokens' logprobs and ranks, the alternatives' ids and logprobs."""
    return (
        torch.empty(rows),
        torch.empty(rows, dtype=torch.int32),
        torch.empty(rows, columns, dtype=torch.int32),
        torch.empty(rows, columns),
    )


_NO_LOGPROBS = _logprob_columns(0, 0)


@sampling.sampling_mask.implement("cpp", device="cpu")
def sampling_mask(logits: Tensor, processed: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, limit = logits.shape[0], rest[-1]
    counts, kept_logprobs, values = torch.empty(rows, dtype=torch.int32), torch.empty(rows), torch.empty(rows)
    ids = _mask_ids.view(rows, limit)
    total = _C.sampling_mask(logits, processed, *rest, counts, ids, kept_logprobs, values)
    return counts, ids.view(-1)[:total].clone(), kept_logprobs, values


class _ReusedBuffer:
    """Room for ids that is used again: fresh pages would cost more than the work on them."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int32)

    def view(self, rows: int, columns: int) -> Tensor:
        if self._ids.numel() < rows * columns:
            self._ids = torch.empty(rows * columns, dtype=torch.int32)
        return self._ids[: rows * columns].view(rows, columns)


_mask_ids = _ReusedBuffer()


@sampling.filter_logits.implement("cpp", device="cpu")
def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, few: bool = False) -> Tensor:
    out = torch.empty_like(logits)
    _C.filter_logits(logits, top_k, top_p, min_p, out)
    return out


@sampling.penalize.implement("cpp", device="cpu")
def penalize(logits: Tensor, *rest: Tensor) -> Tensor:
    out = torch.empty_like(logits)
    _C.penalize(logits, *rest, out)
    return out


@sampling.logprobs.implement("cpp", device="cpu")
def logprobs(
    logits: Tensor, token_ids: Tensor, k: int, named: Tensor | None, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = logits.shape[0], k + (0 if named is None else named.shape[1])
    outputs = _logprob_columns(rows, columns)
    _C.logprobs(logits, token_ids, k, named, temperature, *outputs)
    return outputs
