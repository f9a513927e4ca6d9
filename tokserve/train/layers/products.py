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

from tokserve.train.layers import backward


@dataclass(frozen=True, slots=True)
class Products:
    """`native`: torch's, for operands in bfloat16.  `grouped`: those of all experts of a mixture are one call."""

    native: bool
    grouped: bool = False

    def linear_input(self, grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """[T, N], each [n, K] -> [T, K] of grad's dtype: the gradient of x in x W^T, where `weights` are W's rows."""
        if not (self.native and grad.dtype == torch.bfloat16):
            return backward.linear_input(grad, weights)
        rounded = [weight.to(grad.dtype) for weight in weights]
        return torch.mm(grad, rounded[0] if len(rounded) == 1 else torch.cat(rounded))

    def linear_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """[T, N], [T, K] -> [N, K] float32: the gradient of W in x W^T."""
        if not (self.native and grad.dtype == torch.bfloat16):
            return backward.linear_weight(grad, x)
        return torch.mm(grad.t(), x).float()
