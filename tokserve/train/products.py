"""Which products the gradients of a policy are made of: the ops' or torch's.

The ops sum each element in one chain, whatever the rows and threads.  In the backward pass both operands would have to
be transposed and packed for them first, so where torch multiplies bfloat16 by instructions of its own it is twice as
fast; its bits are the same on every run with as many threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve.train import backward


@dataclass(frozen=True, slots=True)
class Products:
    """`native`: torch's, for operands in bfloat16."""

    native: bool

    def linear_input(self, grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """[T, N], each [n, K] -> [T, K] of grad's dtype: the gradient of x in x W^T, where `weights` are W's rows."""
        if not (self.native and grad.dtype == torch.bfloat16):
            return backward.linear_input(grad, weights)
        return torch.mm(grad, torch.cat([weight.to(grad.dtype) for weight in weights]))

    def linear_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """[T, N], [T, K] -> [N, K] float32: the gradient of W in x W^T."""
        if not (self.native and grad.dtype == torch.bfloat16):
            return backward.linear_weight(grad, x)
        return torch.mm(grad.t(), x).float()

    def attention(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        start: int,
        scale: float,
        window: int,
        *,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `backward.attention`; torch's kernel makes the weights again and keeps none of them."""
        if softcap or not (self.native and q.dtype == torch.bfloat16):
            return backward.attention(grad, q, k, v, start, scale, window, softcap=softcap)
        first = max(0, start - window + 1) if window else 0
        keys, values, count = k[first:], v[first:], len(q)
        mask = None
        if start or (window and window < count):  # else causal
            query = torch.arange(start, start + count, device=q.device)[:, None]
            key = torch.arange(first, len(k), device=q.device)[None]
            mask = (key <= query) & (key > query - window) if window else key <= query
        with torch.enable_grad():
            leaves = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, keys, values)]  # [1, heads, n, D]
            mixed = torch.nn.functional.scaled_dot_product_attention(
                leaves[0], leaves[1], leaves[2], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        grads = torch.autograd.grad(mixed, leaves, grad.transpose(0, 1)[None])
        grad_q, *both = (x[0].transpose(0, 1).float() for x in grads)
        grad_k, grad_v = (torch.nn.functional.pad(x, (0, 0, 0, 0, first, 0)) if first else x for x in both)
        return grad_q, grad_k, grad_v
