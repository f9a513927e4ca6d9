"""From hidden states to the logprobs of given tokens, as the server scores a prompt, with their gradient.

An item is a token to be scored: the row of `hidden` that predicts it, its id, and the ids that its distribution was
restricted to.  Logits are made PIECE_BYTES at a time.  While the budget lasts, probabilities in the head's dtype are
kept of them for the backward pass; else they are computed again there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.layers.embedding import Head
from tokserve.train.byte_budget import ByteBudget
from tokserve.train.layers import adjustments, backward, functions
from tokserve.train.layers.adjustments import AdjustedRow
from tokserve.train.layers.products import Products

PIECE_BYTES = 256 << 20  # of logits whose gradients are multiplied together
# by kind of device, rows of logits that are made at a time: on a CPU as many as share a reading of the head's weight
PRODUCT = {"cpu": 128, "cuda": 1024}
CACHED_BYTES = {"cpu": 4 << 20, "cuda": PIECE_BYTES}  # of logits that go through everything after the product together
COLDEST = 2.0**-100  # lower temperatures count as this one
COLD = 2.0**-7  # below, processed logits are reckoned from the largest before they are divided
Masks = list[Tensor | None]


@dataclass(frozen=True, slots=True)
class Items:
    """`masks`: by item the ids [k] int64 kept, None: all; empty: none has a mask.  `adjusted`: likewise."""

    rows: Tensor  # [n] int64: of the hidden states, ascending
    token_ids: Tensor  # [n] int64
    temperatures: Tensor  # [n] float32, as the request has them
    mode: str  # raw, temperature or processed
    masks: Masks
    adjusted: list[AdjustedRow | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, piece: slice) -> Items:
        """Some of the rows."""
        return Items(
            self.rows[piece],
            self.token_ids[piece],
            self.temperatures[piece],
            self.mode,
            self.masks[piece],
            self.adjusted[piece],
        )

    def divisors(self) -> Tensor:  # [n] float32
        """What logits are divided by; a temperature of 0 is greedy and divides by 1."""
        if self.mode == "raw":
            return torch.ones_like(self.temperatures)
        return torch.where(self.temperatures == 0.0, 1.0, self.temperatures.clamp(min=COLDEST))

    def processed(self, logits: Tensor) -> Tensor:  # [n, V] -> [n, V]
        """Logits before the log softmax, but for a division that `ops.logprobs` makes."""
        if self.mode != "processed":
            return logits
        shifted = (self.temperatures > 0.0) & (self.temperatures < COLD)
        if self.adjusted:
            logits, extreme = adjustments.adjust(logits, self.adjusted)
            shifted |= extreme
        for row, ids in zip(logits, self.masks, strict=False):
            if ids is not None:
                kept = row.index_select(0, ids)
                row.fill_(float("-inf")).index_copy_(0, ids, kept)
        if shifted.any():
            rows = shifted.nonzero()[:, 0]
            part = logits[rows]
            logits[rows] = part - part.amax(1, keepdim=True).clamp(min=-adjustments.MAX_LOGIT)
        divisors = self.divisors()
        return logits if bool((divisors == 1.0).all()) else logits.div_(divisors[:, None])

    def probabilities(self, processed: Tensor) -> Tensor:  # [n, V], overwritten
        """The probabilities of the logits that `processed` returned."""
        if self.mode == "temperature":
            processed = processed.div_(self.divisors()[:, None])
        return ops.softmax(processed)


def logprobs(
    hidden: Tensor, head: Head, weight: Tensor, items: Items, budget: ByteBudget, products: Products
) -> Tensor:  # [m, H] -> [n] float32
    kept = budget if torch.is_grad_enabled() else None
    return functions.applied(_Logprobs, hidden, head, weight, items, kept, products)


def _pieces(items: Items, vocab: int) -> list[slice]:
    return list(backward.pieces(len(items.rows), max(16, PIECE_BYTES // (4 * vocab))))


def _logits(hidden: Tensor, head: Head, items: Items, piece: slice) -> Iterator[tuple[slice, Tensor]]:
    """The items of a piece, some at a time, with their logits [n, V], which may be overwritten."""
    cached = CACHED_BYTES[hidden.device.type]
    for product in backward.pieces(piece.stop - piece.start, PRODUCT[hidden.device.type]):
        first = piece.start + product.start
        logits = head(hidden.index_select(0, items.rows[first : piece.start + product.stop]))
        for rows in backward.pieces(len(logits), max(1, cached // (4 * logits.shape[1]))):
            yield slice(first + rows.start, first + rows.stop), logits[rows]


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        weight: Tensor,
        items: Items,
        budget: ByteBudget | None,
        products: Products,
    ) -> Tensor:
        ctx.head, ctx.items, ctx.products, ctx.kept, ctx.slopes = head, items, products, [], []
        out = torch.empty(len(items.rows), device=hidden.device)
        for piece in _pieces(items, len(weight)):
            size = (piece.stop - piece.start, len(weight))
            keep = budget is not None and not head.softcap and budget.take(size[0] * size[1] * head.dtype.itemsize)
            kept = torch.empty(size, dtype=head.dtype, device=hidden.device) if keep else None
            for rows, logits in _logits(hidden, head, items, piece):
                part = items.part(rows)
                ctx.slopes += adjustments.slopes(logits, part.adjusted) if part.adjusted else [None] * len(part)
                work = part.processed(logits)
                temperature = part.divisors() if part.mode == "temperature" else None
                out[rows] = ops.logprobs(work, part.token_ids, 0, None, temperature)[0]
                if kept is not None:
                    kept[rows.start - piece.start : rows.stop - piece.start] = part.probabilities(work)
            ctx.kept.append(kept)
        ctx.save_for_backward(hidden, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, out = ctx.saved_tensors
        head, items = ctx.head, ctx.items
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight: Tensor | None = None
        rounded = weight.to(head.dtype)
        for number, piece in enumerate(_pieces(items, len(weight))):
            part = items.part(piece)
            rows = hidden.index_select(0, part.rows)
            slopes, ctx.kept[number] = ctx.kept[number], None  # of -logprob at the logits
            steepness = torch.empty(len(part), len(weight), device=hidden.device) if head.softcap else None
            if slopes is None:
                slopes = torch.empty(len(part), len(weight), dtype=head.dtype, device=hidden.device)
                for part_items, logits in _logits(hidden, head, items, piece):
                    within = slice(part_items.start - piece.start, part_items.stop - piece.start)
                    if steepness is not None:
                        steepness[within] = 1.0 - (logits / head.softcap).square_()
                    few = items.part(part_items)
                    slopes[within] = few.probabilities(few.processed(logits))
            slope = torch.expm1(out[piece])  # p - 1 of the token itself, exact where p's dtype would round p to 1
            slopes[torch.arange(len(slopes), device=slopes.device), part.token_ids] = slope.to(head.dtype)
            for row, change in zip(slopes, ctx.slopes[piece], strict=True):
                if change is not None:  # of repeated ids
                    row[change[0]] *= change[1].to(head.dtype)
            if steepness is not None:
                slopes = steepness.mul_(slopes).to(head.dtype)
            factor = (-grad[piece] * head.multiplier / part.divisors())[:, None]
            part_grad = ctx.products.linear_input(slopes, [rounded]).float()
            grad_hidden += ops.sum_rows(part_grad.mul_(factor), part.rows, len(hidden))
            if ctx.needs_input_grad[2]:
                share = ctx.products.linear_weight(slopes, (rows * factor).to(head.dtype))
                grad_weight = share if grad_weight is None else grad_weight.add_(share)
        return grad_hidden.to(hidden.dtype), None, grad_weight, None, None, None


class Logits(torch.autograd.Function):
    """A head's logits [n, V] float32 of hidden states [n, H]; `weight`: its master [V, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, weight: Tensor, products: Products) -> Tensor:
        ctx.head, ctx.products = head, products
        ctx.save_for_backward(hidden, weight)
        return head(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        head, dtype, needs = ctx.head, ctx.head.dtype, ctx.needs_input_grad
        if head.softcap:
            grad = grad * (1.0 - (head(hidden) / head.softcap).square_())
        rounded = (grad if head.multiplier == 1.0 else grad * head.multiplier).to(dtype)
        rounded = rounded.contiguous()  # the gradient of a sum is one number
        grad_hidden = ctx.products.linear_input(rounded, [weight]).to(hidden.dtype) if needs[0] else None
        return grad_hidden, None, ctx.products.linear_weight(rounded, hidden.to(dtype)) if needs[2] else None, None
