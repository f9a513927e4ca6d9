"""Root-mean-square norm, alone or joined with the residual addition before it.

It holds a weight and an epsilon; the arithmetic is the op's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.parameter import Parameter, owned_copy


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    weight: Tensor  # [size]

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        self.size = size
        self.eps = eps
        self.dtype = dtype

    def parameters(self) -> dict[str, Parameter]:
        """`weight`."""
        return {"weight": Parameter((self.size,), self.load, self.dtype)}

    def load(self, tensor: Tensor) -> None:
        """Take the weight [size]."""
        self.weight = owned_copy(tensor, (self.size,), self.dtype)

    def __call__(self, x: Tensor) -> Tensor:  # [T, size] -> [T, size]
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), each [T, size]."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
