"""The C++ implementations of the ops on float8 weights: those of weights of 8 bits, with rows of x rounded to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import float8, mixture
from tokserve.ops.cpu import wna16
from tokserve.ops.cpu.mixture import check_experts
from tokserve.ops.float8 import PackedFloat8


@float8.pack_linear_float8.implement("cpp", device="cpu")
def pack_linear_float8(weight: Tensor) -> PackedFloat8:
    """Round by rows, and pack as `pack_scaled_float8` does."""
    values, scales = float8.quantize(weight)
    return pack_scaled_float8(values, scales[None], weight.shape[1])


@float8.pack_gated_float8.implement("cpp", device="cpu")
def pack_gated_float8(weight: Tensor) -> PackedFloat8:
    values, scales = float8.quantize(weight)
    return pack_scaled_float8(values, scales[None], weight.shape[1], True)


@float8.pack_scaled_float8.implement("cpp", device="cpu")
def pack_scaled_float8(values: Tensor, scales: Tensor, group: int, gated: bool = False) -> PackedFloat8:
    """Pack a byte for each value in the layout of weights of 8 bits (csrc/unpack.h)."""
    weight = wna16.packed_float8(values.view(torch.uint8), scales.t(), group, gated=gated, rounded=True)
    (part,) = weight.parts
    return PackedFloat8(part.rows, part.columns, part.packed, part.scales, group, weight)


@float8.linear_float8.implement("cpp", device="cpu")
def linear_float8(x: Tensor, packed: PackedFloat8, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    return wna16.linear_wna16(x, packed.handle, bias, out_dtype)


@float8.gated_linear_float8.implement("cpp", device="cpu")
def gated_linear_float8(x: Tensor, packed: PackedFloat8, bias: Tensor | None, activation: str | None) -> Tensor:
    """Rows of x need not be adjacent."""
    return wna16.gated_linear_wna16(x, packed.handle, bias, activation)


@mixture.experts_float8.implement("cpp", device="cpu")
def experts_float8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[PackedFloat8],
    gate_up_bias: Tensor | None,
    down: Sequence[PackedFloat8],
    down_bias: Tensor | None,
    activation: str,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Rows of x need not be adjacent."""
    check_experts(x, gate_up[0], down[0])
    out = x.new_empty(x.shape[0], x.shape[1])
    _C.experts_wna16(
        x,
        ids,
        weights,
        [one.handle.handle for one in gate_up],
        gate_up_bias,
        [one.handle.handle for one in down],
        down_bias,
        activation,
        down[0].columns,
        shared,
        shared_gate,
        out,
    )
    return out
