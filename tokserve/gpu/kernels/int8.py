"""Int8 on the GPU: rows rounded to integers, and products of such rows, summed as integers.

Sums of integers are exact in any order, and the rest is the reference's one expression for each element: the bits are
those of every other implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.dense import product
from tokserve.gpu.kernels.launch import (
    is_dependent,
    launch_dependents,
    launched,
    next_power_of_2,
    torch_device,
    wait_for_inputs,
    warps,
)
from tokserve.ops import quant
from tokserve.ops.quant import PackedInt8

LEVELS = tl.constexpr(quant.LEVELS)
MIN_MAGNITUDE = tl.constexpr(quant.MIN_MAGNITUDE)
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it is rounded to an integer, ties to even
INTEGER_STEP = 128  # inputs of one step


@triton.jit
def int8_rows_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One row of WIDTH elements: its values and its scale."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    launch_dependents(DEPENDENT)
    largest = tl.max(tl.abs(x), 0)
    has_nan = tl.sum((x != x).to(tl.int32), 0) > 0
    finite = (largest < float("inf")) & (has_nan == 0)
    largest = tl.where(finite, tl.maximum(largest, MIN_MAGNITUDE), 1.0)
    value = tl.where(finite, x, 0.0) * tl.div_rn(LEVELS, largest)
    rounded = (value + TO_INTEGER) - TO_INTEGER
    tl.store(out_ptr + row * WIDTH + column, rounded.to(tl.int8), mask=inside)
    tl.store(scale_ptr + row, tl.where(finite, tl.div_rn(largest, LEVELS), float("nan")))


@quant.quantize_rows.implement("triton", device="cuda")
def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x need not be adjacent."""
    rows, width = x.shape
    values, scales = x.new_empty((rows, width), dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    if rows:
        block, device = next_power_of_2(width), x.device.index
        int8_rows_kernel[(rows,)](
            x,
            values,
            scales,
            x.stride(0),
            width,
            block,
            is_dependent(device),
            num_warps=warps(block),
            **launched(device),
        )
    return values, scales


@quant.pack_linear_int8.implement("triton", device="cuda")
@quant.pack_gated_int8.implement("triton", device="cuda")
def pack(weight: Tensor, rows: int | None = None, first: int = 0, into: PackedInt8 | None = None) -> PackedInt8:
    """Values and scales on the GPU."""
    values, scales = quantize(weight.to(torch_device()).contiguous())
    height, columns = weight.shape
    if into is None and rows in (None, height):
        return PackedInt8(height, columns, values, scales)
    if into is None:
        assert rows is not None
        into = PackedInt8(rows, columns, values.new_empty(rows, columns), scales.new_empty(rows))
    part = slice(first, first + height)
    into.packed[part], into.scales[part] = values, scales
    return into


@quant.linear_int8.implement("triton", device="cuda")
def linear(x: Tensor, packed: PackedInt8, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    values, scales = quantize(x)
    out = x.new_empty((x.shape[0], packed.rows), dtype=out_dtype or x.dtype)
    return product(values, packed.packed, bias, out, (scales, packed.scales))
