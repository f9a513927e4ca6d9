"""The methods that quantize a linear layer's weight while it loads, or keep it as a checkpoint stores it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokserve import ops
from tokserve.families.quantization.quantized import Int4, QuantizedWeight, Wna16
from tokserve.layers.parameter import StoredWeight
from tokserve.layers.quant import STORED_INTEGERS, UNQUANTIZED, Packed, QuantMethod
from tokserve.ops.wna16 import STEP


class Int8:
    """Weights int8 with a scale per output, activations int8 with a scale per token, both symmetric."""

    name: str | None = "int8"
    keeps_floats = False
    covers_experts = True
    packs_rows = True

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """int8; the scales are not worth counting."""
        return torch.int8

    def accepts(self, stored: StoredWeight) -> bool:
        return False

    def pack(self, weight: Tensor, *rest: Any) -> Packed:
        return ops.pack_linear_int8(weight, *rest)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Multiply with `ops.linear_int8`, which sums integers."""
        return ops.linear_int8(x, packed, bias, out_dtype)

    def pack_gated(self, weight: Tensor, *rest: Any) -> Packed:
        """Likewise, in the layout of `ops.gated_linear_int8`."""
        return ops.pack_gated_int8(weight, *rest)

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        return ops.gated_linear_int8(x, packed, bias, activation)

    def experts(self, *arguments: Any) -> Tensor:
        return ops.experts_int8(*arguments)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A weight [N,K] stored as float8 (e4m3), each `group` of a row's inputs with a scale of its own."""

    values: Tensor  # [N,K] float8
    scales: Tensor  # [G,N] float32
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what the values mean: float32."""
        return self.scales.dtype

    def dense(self) -> Tensor:
        """The product of values and scales: [N,K] float32."""
        spread = self.scales.t().repeat_interleave(self.group, 1)
        return self.values.float() * spread[:, : self.values.shape[1]]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.values, self.scales

    def clone(self) -> Float8Weight:
        return Float8Weight(self.values.clone(), self.scales.clone(), self.group)

    def narrow(self, dim: int, start: int, length: int) -> Tensor | Float8Weight:
        """A part, with its scales; in smaller groups if it begins or ends within one, or a tensor of floats if those
        would be smaller than products take."""
        values = self.values.narrow(dim, start, length)
        if dim == 0:
            return Float8Weight(values, self.scales.narrow(1, start, length), self.group)
        if len(self.scales) == 1:
            return Float8Weight(values, self.scales, length)
        end = start + length
        group = math.gcd(self.group, start, 0 if end == self.shape[1] else end)
        if group % STEP:
            return self.dense().narrow(1, start, length)
        scales = self.scales.repeat_interleave(self.group // group, 0)
        return Float8Weight(values, scales[start // group : -(-end // group)], group)

    def joined(self, others: Sequence[StoredWeight]) -> Float8Weight | None:
        """All rows in one weight; None unless all are float8 in groups of one size."""
        weights = [self, *(other for other in others if isinstance(other, Float8Weight) and other.group == self.group)]
        if len(weights) <= len(others):
            return None
        values, scales = torch.cat([weight.values for weight in weights]), [weight.scales for weight in weights]
        return Float8Weight(values, torch.cat(scales, 1), self.group)

    def packed_rows(self) -> None:
        """Returns None: its rows are not looked up."""


class Float8:
    """Weights float8 (e4m3) with a scale per output, activations float8 with a scale per token.  A weight that is
    stored as float8 keeps its own scales."""

    name: str | None = "fp8"
    keeps_floats = False
    covers_experts = True
    packs_rows = False

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float8; the scales are not worth counting."""
        return torch.float8_e4m3fn

    def accepts(self, stored: StoredWeight) -> bool:
        """Whether it is float8 with one group, or groups of whole steps of the product."""
        return isinstance(stored, Float8Weight) and (len(stored.scales) == 1 or stored.group % ops.FLOAT8_STEP == 0)

    def pack(self, weight: Tensor | Float8Weight, *rest: Any) -> Packed:
        """Pack a weight in the layout of `ops.linear_float8`; quantize what is not float8 yet."""
        if isinstance(weight, Float8Weight):
            return ops.pack_scaled_float8(weight.values, weight.scales, weight.group)
        return ops.pack_linear_float8(weight)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Multiply with `ops.linear_float8`, which sums in float32."""
        return ops.linear_float8(x, packed, bias, out_dtype)

    def pack_gated(self, weight: Tensor | Float8Weight, *rest: Any) -> Packed:
        """Likewise, in the layout of `ops.gated_linear_float8`."""
        if isinstance(weight, Float8Weight):
            return ops.pack_scaled_float8(weight.values, weight.scales, weight.group, True)
        return ops.pack_gated_float8(weight)

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        return ops.gated_linear_float8(x, packed, bias, activation)

    def experts(self, *arguments: Any) -> Tensor:
        return ops.experts_float8(*arguments)


class Stored(Wna16):
    """Weights as their checkpoint stores them, or floats where it stores floats: float8 numbers, too, which are
    multiplied as what they mean in the dtype of the activations."""

    def accepts(self, stored: StoredWeight) -> bool:
        """Whether it is quantized in groups, or float8 in groups of whole steps of the product."""
        if isinstance(stored, Float8Weight):
            return not self.rounded and (len(stored.scales) == 1 or stored.group % STEP == 0)
        return super().accepts(stored)

    def pack(self, weight: Tensor | QuantizedWeight | Float8Weight, *rest: Any) -> Any:
        """Pack a weight in the layout of `ops.linear_wna16`; floats in that of `ops.linear`."""
        return super().pack(_in_rows(weight), *rest)

    def pack_gated(self, weight: Tensor | QuantizedWeight | Float8Weight, *rest: Any) -> Any:
        """Pack a weight in the layout of `ops.gated_linear_wna16`; floats in that of `ops.gated_linear`."""
        return super().pack_gated(_in_rows(weight), *rest)


def _in_rows(weight: Tensor | QuantizedWeight | Float8Weight) -> Tensor | QuantizedWeight:
    """A float8 weight as one with a scale per group."""
    if not isinstance(weight, Float8Weight):
        return weight
    codes, scales = weight.values.view(torch.uint8), weight.scales.t().contiguous()
    return QuantizedWeight((ops.QuantizedRows(codes, None, weight.group, scales, float8=True),))


FLOAT8, WNA16 = Float8(), Stored()
METHODS: dict[str, QuantMethod] = {
    "int8": Int8(),
    "int4": Int4(),
    "fp8": FLOAT8,
    "none": UNQUANTIZED,
    "wna16": WNA16,
}


def quant_methods(
    quantization: str | None, group_size: int, *, quantize_lm_head: bool, rounded: bool = False
) -> tuple[QuantMethod, QuantMethod]:
    """How the projections are quantized, and how the head is, whose activations are `rounded` by int8 alone."""
    if quantization == "int4":
        quant: QuantMethod = Int4(group_size, rounded=rounded)
    elif quantization == STORED_INTEGERS and rounded:
        quant = Stored(rounded=True)
    else:
        quant = UNQUANTIZED if quantization is None else METHODS[quantization]
    return quant, _head_method(quant, quantize=quantize_lm_head)


def _head_method(quant: QuantMethod, *, quantize: bool) -> QuantMethod:
    """The method of the head: to quantize it, that of the projections, or int8 where these stay what they are; else it
    stays what it is."""
    if quantize:
        return METHODS["int8"] if quant.name in (None, STORED_INTEGERS) else quant
    return WNA16 if quant.name in ("int4", STORED_INTEGERS) else UNQUANTIZED
