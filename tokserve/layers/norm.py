"""Norms, alone or joined with the residual addition before them.

All have the same methods, so a decoder does not ask which kind it has; `NoNorm` stands where a family has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.parameter import Parameter, owned_copy
from tokserve.layers.places import VectorPlace


@dataclass(frozen=True, slots=True)
class NormSpec:
    """`kind`: "rms" divides by the root mean square; "layer" subtracts the mean first, and may add a `bias`.  `offset`:
    what is added to the stored weight; 1 in families that store the difference from 1.  `learned` False: there is
    no weight."""

    eps: float
    offset: float = 0.0
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    learned: bool = True


class NoNorm:
    """Returns what it is given."""

    def parameters(self) -> dict[str, Parameter]:
        return {}

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor, multiplier: float = 1.0) -> tuple[Tensor, Tensor]:
        """(x * multiplier + residual, the same), [T, size]."""
        total = ops.add_residual(x, residual, multiplier)
        return total, total


class RMSNorm(NoNorm):
    """x / rms(x) * weight over the last dimension.  A weight with an offset is kept in float32, because the sum has
    more digits than a narrower dtype holds, and so is what it was without: it cannot be had from the sum."""

    weight: Tensor  # [size]

    def __init__(self, size: int, spec: NormSpec, dtype: torch.dtype) -> None:
        self.size = size
        self.eps = spec.eps
        self.offset = spec.offset
        self.dtype = torch.float32 if spec.offset else dtype
        self.loaded: Tensor | None = None  # [size], of a weight with an offset
        self.learned = spec.learned
        if not spec.learned:
            self.weight = torch.ones(size, dtype=self.dtype, device=ops.torch_device)

    def parameters(self) -> dict[str, Parameter]:
        """`weight`, unless there is none."""
        if not self.learned:
            return {}
        return {"weight": Parameter((self.size,), self.load, self.dtype, offset=self.offset, places=self.places)}

    def places(self) -> list[VectorPlace]:
        """The weight; with an offset, what was loaded before it."""
        if self.loaded is None:
            return [VectorPlace(self.weight)]
        return [VectorPlace(self.loaded), VectorPlace(self.weight, self.offset)]

    def load(self, tensor: Tensor) -> None:
        weight = tensor.float() + self.offset if self.offset else tensor
        self.weight = owned_copy(weight, (self.size,), self.dtype)
        self.loaded = owned_copy(tensor, (self.size,), self.dtype) if self.offset else None

    def __call__(self, x: Tensor) -> Tensor:  # [T, size] -> [T, size]
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, multiplier: float = 1.0) -> tuple[Tensor, Tensor]:
        """(norm of the sum x * multiplier + residual, the sum), each [T, size]."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps, multiplier)


class LayerNorm(RMSNorm):
    """(x - mean) / deviation * weight + bias over the last dimension; the bias may be missing."""

    def __init__(self, size: int, spec: NormSpec, dtype: torch.dtype) -> None:
        super().__init__(size, spec, dtype)
        self.bias = torch.zeros(size, dtype=self.dtype, device=ops.torch_device) if spec.bias else None

    def parameters(self) -> dict[str, Parameter]:
        """`weight` and `bias`, where there are such."""
        parameters = super().parameters()
        if self.bias is not None:
            parameters["bias"] = Parameter((self.size,), self.load_bias, self.dtype, places=self._bias_places)
        return parameters

    def _bias_places(self) -> list[VectorPlace]:
        assert self.bias is not None
        return [VectorPlace(self.bias)]

    def load_bias(self, tensor: Tensor) -> None:
        self.bias = owned_copy(tensor, (self.size,), self.dtype)

    def __call__(self, x: Tensor) -> Tensor:  # [T, size] -> [T, size]
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor, multiplier: float = 1.0) -> tuple[Tensor, Tensor]:
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, multiplier)


def make_norm(size: int, spec: NormSpec, dtype: torch.dtype) -> RMSNorm:
    """The norm that the spec describes, of rows of `size`."""
    return LayerNorm(size, spec, dtype) if spec.kind == "layer" else RMSNorm(size, spec, dtype)
