"""Float8 on the GPU: weights, and products of rounded rows, batch-invariant or by cuBLAS.

The matrix unit adds float8 products with 14 bits; so it adds within one step of K only, and steps add up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokserve.gpu.kernels import elementwise, mixture
from tokserve.gpu.kernels.dense import product
from tokserve.gpu.kernels.launch import torch_device
from tokserve.gpu.kernels.rows.rounded import note_weight, quantize
from tokserve.ops import float8
from tokserve.ops import mixture as references
from tokserve.ops.float8 import PackedFloat8

CUBLAS_ALIGN = 16  # cuBLAS takes sides that are multiples of this


@float8.pack_linear_float8.implement("cublas", device="cuda")
@float8.pack_linear_float8.implement("triton", device="cuda")
@float8.pack_gated_float8.implement("cublas", device="cuda")
@float8.pack_gated_float8.implement("triton", device="cuda")
def pack(weight: Tensor) -> PackedFloat8:
    """Values and scales on the GPU."""
    rows, columns = weight.shape
    note_weight(columns)
    values, scales = quantize(weight.to(torch_device()).contiguous())
    return PackedFloat8(rows, columns, values, scales[None], columns)


@float8.pack_scaled_float8.implement("cublas", device="cuda")
@float8.pack_scaled_float8.implement("triton", device="cuda")
def pack_scaled(values: Tensor, scales: Tensor, group: int, gated: bool = False) -> PackedFloat8:
    """Pack values that have scales already: copies on the GPU, where a gated weight has no layout of its own."""
    rows, columns = values.shape
    note_weight(columns)
    copy = values.to(torch_device(), copy=True, memory_format=torch.contiguous_format)
    return PackedFloat8(rows, columns, copy, scales.to(torch_device(), copy=True).contiguous(), group)


@float8.linear_float8.implement("triton", device="cuda")
def linear(x: Tensor, packed: PackedFloat8, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Sums are those of the matrix unit."""
    values, scales = quantize(x)
    out = x.new_empty((x.shape[0], packed.rows), dtype=out_dtype or x.dtype)
    group = packed.group if len(packed.scales) > 1 else 0
    return product(values, packed.packed, bias, out, (scales, packed.scales), group)


@float8.linear_float8.implement("cublas", device="cuda")
def linear_by_cublas(
    x: Tensor, packed: PackedFloat8, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Not batch-invariant; falls back to `linear` for shapes and dtypes that cuBLAS does not take."""
    fits = len(packed.scales) == 1 and packed.rows % CUBLAS_ALIGN == 0 and packed.columns % CUBLAS_ALIGN == 0
    if (out_dtype or x.dtype) != torch.bfloat16 or not fits or len(x) == 0:
        return linear(x, packed, bias, out_dtype)
    values, scales = quantize(x)
    result = torch._scaled_mm(values, packed.packed.t(), scales[:, None], packed.scales, out_dtype=torch.bfloat16)
    return result if bias is None else result.add_(bias)


@float8.gated_linear_float8.implement("triton", device="cuda")
def gated_linear(x: Tensor, packed: PackedFloat8, bias: Tensor | None, activation: str | None) -> Tensor:
    """Two kernels: the product, then the gate."""
    both = linear(x, packed, bias)
    return both if activation is None else elementwise.activate(both, activation, True)


@float8.gated_linear_float8.implement("cublas", device="cuda")
def gated_linear_by_cublas(x: Tensor, packed: PackedFloat8, bias: Tensor | None, activation: str | None) -> Tensor:
    """Not batch-invariant, like the product."""
    both = linear_by_cublas(x, packed, bias)
    return both if activation is None else elementwise.activate(both, activation, True)


def _by_group(weights: Sequence[PackedFloat8]) -> dict[int, list[PackedFloat8 | None]]:
    """The weights by the inputs that share a scale (0: all), and by expert, None for those of another kind."""
    kinds: dict[int, list[PackedFloat8 | None]] = {}
    for expert, weight in enumerate(weights):
        group = weight.group if len(weight.scales) > 1 else 0
        kinds.setdefault(group, [None] * len(weights))[expert] = weight
    return kinds


@references.experts_float8.implement("cublas", device="cuda")
@references.experts_float8.implement("triton", device="cuda")
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
    """Rows of x need not be adjacent.  Experts whose scales are for as many inputs are multiplied in one launch: all of
    a layer, unless an update brought some in floats."""
    k = ids.shape[1]

    def up(sorting: mixture.Sorting) -> Tensor:
        values, scales = quantize(x)
        kinds = _by_group(gate_up)
        if len(kinds) == 1:
            (group,) = kinds
            return mixture.gated_product(values, gate_up, gate_up_bias, sorting, k, activation, x.dtype, scales, group)
        both = x.new_empty(ids.numel(), gate_up[0].rows)
        for group, some in kinds.items():
            mixture.product(values, some, gate_up_bias, both, sorting, k, scales, group)
        return mixture.activated(both, activation)

    def back(inner: Tensor, out: Tensor, sorting: mixture.Sorting) -> None:
        values, scales = quantize(inner)
        for group, some in _by_group(down).items():
            mixture.product(values, some, down_bias, out, sorting, 0, scales, group)

    return mixture.mixed(x, ids, weights, len(gate_up), up, back, shared, shared_gate)
