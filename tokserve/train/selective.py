"""Logprobs of given tokens from the server's logits, summed in the server's order, with their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.train.layers import backward, functions
from tokserve.train.requests import Mask, check_mode
from tokserve.train.scores import PIECE_BYTES, Items


def selective_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    logprobs_mode: str = "temperature",
    sampling_masks: Sequence[Mask] | None = None,
) -> Tensor:
    """Logprobs float32 [...] of `token_ids` int64 [...] in the rows of `logits` float32 [..., V].

    They `==` the server's if the logits are (those of `exact` models are).  `temperature`: one number, or one for each
    token; it counts in the modes "temperature" and "processed", and 0 counts as 1.  `sampling_masks`: for "processed",
    by token in the order of the flattened `token_ids`, the ids that it was drawn from, None: the whole vocabulary.
    Differentiable once, in `logits`.  Raises ValueError.
    """
    check_mode(logprobs_mode)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, as the server's are, got {logits.dtype}")
    if logits.shape[:-1] != token_ids.shape:
        raise ValueError(f"token_ids must have the shape {list(logits.shape[:-1])}, got {list(token_ids.shape)}")
    ids = token_ids.reshape(-1).to(torch.int64)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[-1]:
        raise ValueError(f"token_ids holds an id outside the vocabulary of {logits.shape[-1]}")
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    if not bool(((temperatures >= 0.0) & temperatures.isfinite()).all()):
        raise ValueError("temperature must be 0 or a positive number")
    items = Items(
        rows=torch.arange(len(ids), device=logits.device),
        token_ids=ids,
        temperatures=temperatures.expand(token_ids.shape).reshape(-1).contiguous(),
        mode=logprobs_mode,
        masks=_masks(sampling_masks, ids, logits) if logprobs_mode == "processed" else [],
    )
    flat = logits.reshape(len(ids), logits.shape[-1])
    return functions.applied(_Selective, flat, items).view(token_ids.shape)


def _masks(masks: Sequence[Mask] | None, ids: Tensor, logits: Tensor) -> list[Tensor | None]:
    if masks is None:
        return []
    if len(masks) != len(ids):
        raise ValueError(f"sampling_masks has {len(masks)} entries for {len(ids)} tokens")
    kept: list[Tensor | None] = []
    for number, (mask, token) in enumerate(zip(masks, ids.tolist(), strict=True)):
        if mask is not None and (token not in mask or min(mask) < 0 or max(mask) >= logits.shape[-1]):
            raise ValueError(f"sampling_masks[{number}] must hold ids of the vocabulary, among them {token}")
        kept.append(None if mask is None else torch.tensor(sorted(set(mask)), dtype=torch.int64, device=logits.device))
    return kept


class _Selective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, items: Items) -> Tensor:
        out = torch.empty(len(logits), device=logits.device)
        for piece in _pieces(logits):
            part = items.part(piece)
            work = part.processed(logits[piece].clone()) if part.mode == "processed" else logits[piece].contiguous()
            temperature = part.divisors() if part.mode == "temperature" else None
            out[piece] = ops.logprobs(work, part.token_ids, 0, None, temperature)[0]
        ctx.save_for_backward(logits, out)
        ctx.items = items
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, out = ctx.saved_tensors
        slopes = torch.empty_like(logits)
        for piece in _pieces(logits):
            part = ctx.items.part(piece)
            rows = part.probabilities(part.processed(logits[piece].clone()))
            rows[torch.arange(len(rows), device=rows.device), part.token_ids] = torch.expm1(out[piece])
            slopes[piece] = rows.mul_((-grad[piece] / part.divisors())[:, None])
        return slopes, None


def _pieces(logits: Tensor) -> list[slice]:
    return list(backward.pieces(len(logits), max(16, PIECE_BYTES // (4 * logits.shape[1]))))
