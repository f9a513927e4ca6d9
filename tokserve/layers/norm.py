"""Root-mean-square norm, alone or joined with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.parameter import Parameter, owned_copy
from tokserve.layers.places import VectorPlace


@dataclass(frozen=True, slots=True)
class NormSpec:
    """`offset`: what is added to the stored weight; 1 in families that store the difference from 1."""

    eps: float
    offset: float = 0.0


class RMSNorm:
    """x / rms(x) * weight over the last dimension.

    A weight with an offset is kept in float32, because the sum has more digits than a narrower dtype holds, and so is
    what it was without: it cannot be had from the sum.
    """

    weight: Tensor  # [size]

    def __init__(self, size: int, spec: NormSpec, dtype: torch.dtype) -> None:
        self.size = size
        self.eps = spec.eps
        self.offset = spec.offset
        self.dtype = torch.float32 if spec.offset else dtype
        self.loaded: Tensor | None = None  # [size], of a weight with an offset

    def parameters(self) -> dict[str, Parameter]:
        """`weight`."""
        return {"weight": Parameter((self.size,), self.load, self.dtype, offset=self.offset, places=self.places)}

    def places(self) -> list[VectorPlace]:
        """The weight; with an offset, what was loaded before it."""
        if self.loaded is None:
            return [VectorPlace(self.weight)]
        return [VectorPlace(self.loaded), VectorPlace(self.weight, self.offset)]

    def load(self, tensor: Tensor) -> None:
        """Take the weight [size]."""
        weight = tensor.float() + self.offset if self.offset else tensor
        self.weight = owned_copy(weight, (self.size,), self.dtype)
        self.loaded = owned_copy(tensor, (self.size,), self.dtype) if self.offset else None

    def __call__(self, x: Tensor) -> Tensor:  # [T, size] -> [T, size]
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), each [T, size]."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
