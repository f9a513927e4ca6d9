"""How a linear layer keeps and multiplies its weight: as it is, or quantized while it loads.

A method packs a floating weight and multiplies rows with what it packed; it holds no state, so one object serves all
layers.  It must not know which layer asks, nor where the weight comes from.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tokserve import ops

Packed = ops.PackedWeight | ops.PackedInt8 | ops.PackedFloat8


class QuantMethod(Protocol):
    """`linear(x, pack(weight), bias, None)` is x [T, inputs] times weight [outputs, inputs], transposed, plus bias.

    With `gated_linear` and `pack_gated`, activation(first half) * second half of that.  A packed weight is the method's
    own affair: what one of these pairs packs, it alone takes.
    """

    name: str | None  # the value of the option `quantization`; None: none

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What an element of a weight of `dtype` is kept as."""

    def pack(self, weight: Tensor) -> Packed:
        """Take a floating weight; nothing of it is kept."""

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """[T, outputs] in `out_dtype`; None: x's dtype."""

    def pack_gated(self, weight: Tensor) -> Packed:
        """Likewise, of a gate and what it gates."""

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        """[T, outputs / 2] in x's dtype; activation None: the product itself, [T, outputs]."""


class Unquantized:
    """The weight in its own dtype."""

    name: str | None = None

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The same."""
        return dtype

    def pack(self, weight: Tensor) -> Packed:
        """In the layout of `ops.linear`."""
        return ops.pack_linear(weight)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Summed in float32."""
        return ops.linear(x, packed, bias, out_dtype)

    def pack_gated(self, weight: Tensor) -> Packed:
        """In the layout of `ops.gated_linear`."""
        return ops.pack_gated(weight)

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        """One op."""
        return ops.gated_linear(x, packed, bias, activation)


class Int8:
    """Weights int8 with a scale per output, activations int8 with a scale per token, both symmetric."""

    name: str | None = "int8"

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """int8; the scales are not worth counting."""
        return torch.int8

    def pack(self, weight: Tensor) -> Packed:
        """Quantize, in the layout of `ops.linear_int8`."""
        return ops.pack_linear_int8(weight)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Summed as integers."""
        return ops.linear_int8(x, packed, bias, out_dtype)

    def pack_gated(self, weight: Tensor) -> Packed:
        """Likewise, in the layout of `ops.gated_linear_int8`."""
        return ops.pack_gated_int8(weight)

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        """One op."""
        return ops.gated_linear_int8(x, packed, bias, activation)


class Float8:
    """Likewise float8 (e4m3); a weight that is stored so keeps its scales."""

    name: str | None = "fp8"

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float8; the scales are not worth counting."""
        return torch.float8_e4m3fn

    def pack(self, weight: Tensor) -> Packed:
        """Quantize, in the layout of `ops.linear_float8`."""
        return ops.pack_linear_float8(weight)

    def takes(self, scales: Tensor, group: int) -> bool:
        """Whether `pack_scaled` takes scales [G,N], each of `group` inputs."""
        return len(scales) == 1 or group % ops.FLOAT8_STEP == 0

    def pack_scaled(self, values: Tensor, scales: Tensor, group: int) -> Packed:
        """Take a weight that is stored so: float8 [N,K] with scales [G,N], each of `group` inputs."""
        return ops.pack_scaled_float8(values, scales, group)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Summed in float32."""
        return ops.linear_float8(x, packed, bias, out_dtype)

    def pack_gated(self, weight: Tensor) -> Packed:
        """As any other."""
        return self.pack(weight)

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        """Two ops: the product, then the gate."""
        return gated(self.linear(x, packed, bias, None), activation)


def gated(both: Tensor, activation: str | None) -> Tensor:
    """What a gated product [T, 2 * inner] ends in: activation(first half) * second half; None: the product itself."""
    if activation is None:
        return both
    return ops.silu_mul(both) if activation == "silu" else ops.gelu_mul(both)


UNQUANTIZED = Unquantized()
METHODS: dict[str, QuantMethod] = {"int8": Int8(), "fp8": Float8(), "none": UNQUANTIZED}
