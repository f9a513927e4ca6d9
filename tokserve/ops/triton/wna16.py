"""Products with weights of 4 or 8 bits on the GPU: factors are unpacked on the way to the matrix unit.

Within a group, products of factors are summed in float32 from zero on; the sum times the group's scale is added to the
output, then the minimum times the sum of the group's inputs, groups ascending.  That order holds for every tile shape,
so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.ops import wna16
from tokserve.ops.triton import elementwise
from tokserve.ops.triton.launch import EXACT, torch_device, tuned
from tokserve.ops.wna16 import SIGNED, UNSIGNED, PackedPart, PackedWna16, QuantizedRows

STEPS = (64, 32, 16)  # inputs that are multiplied at once: the most that do not exceed a group
LINEAR = {SIGNED: 8, UNSIGNED: 0}  # factors that are the code less a number


@triton.jit
def wna16_sums(
    x_ptr, row, in_rows, codes_ptr, factors_ptr, scales_ptr, mins_ptr, order_ptr, output, in_outputs, inputs, groups,
    x_stride, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, MINS: tl.constexpr, ORDER: tl.constexpr,
    FOLDED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows `row` [M] of x times outputs `output` [N] of a part: [M,N] float32.  ZERO: what is taken from a code; below
    0, codes index the table of factors."""
    step = tl.arange(0, BLOCK_K)
    codes_per_row = inputs if BITS == 8 else (inputs + 1) // 2
    total = tl.zeros([row.shape[0], output.shape[0]], tl.float32)
    for group in range(0, groups):
        scale = tl.load(scales_ptr + output * groups + group, mask=in_outputs, other=0.0)
        sums = total
        if not FOLDED:
            sums = tl.zeros([row.shape[0], output.shape[0]], tl.float32)
        shift = tl.zeros([row.shape[0]], tl.float32)
        for at in range(0, GROUP, BLOCK_K):
            k = group * GROUP + at + step
            inside = (at + step < GROUP) & (k < inputs)
            column = k
            if ORDER:
                column = tl.load(order_ptr + k, mask=inside, other=0)
            x = tl.load(
                x_ptr + row[:, None] * x_stride + column[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0
            )
            valid = in_outputs[:, None] & inside[None, :]
            if BITS == 8:
                codes = tl.load(codes_ptr + output[:, None] * codes_per_row + k[None, :], mask=valid, other=0)
                factor = codes.to(tl.int8, bitcast=True).to(tl.float32)
            else:
                pair = tl.load(codes_ptr + output[:, None] * codes_per_row + k[None, :] // 2, mask=valid, other=0)
                codes = (pair.to(tl.int32) >> (k[None, :] % 2 * 4)) & 15
                if ZERO < 0:  # noqa: SIM108 - a choice of the compiler's
                    factor = tl.load(factors_ptr + codes).to(tl.float32)
                else:
                    factor = (codes - ZERO).to(tl.float32)
                factor = tl.where(valid, factor, 0.0)
            if FOLDED:
                factor = factor * scale[:, None]
            if MINS:
                shift += tl.sum(x.to(tl.float32), 1)
            if FOLDED and x.dtype == tl.float16:  # which does not hold every power of two
                sums = tl.dot(x.to(tl.float32), tl.trans(factor), sums, input_precision="ieee")
            else:
                sums = tl.dot(x, tl.trans(factor.to(x.dtype)), sums, input_precision="ieee")
        if FOLDED:
            total = sums
        else:
            total += sums * scale[None, :]
            if MINS:
                low = tl.load(mins_ptr + output * groups + group, mask=in_outputs, other=0.0)
                total += shift[:, None] * low[None, :]
    return total


@triton.jit
def wna16_kernel(
    x_ptr, codes_ptr, factors_ptr, scales_ptr, mins_ptr, order_ptr, bias_ptr, out_ptr, rows, outputs, inputs, groups,
    x_stride, out_stride, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, MINS: tl.constexpr,
    ORDER: tl.constexpr, FOLDED: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the output."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_outputs = row < rows, output < outputs
    total = wna16_sums(
        x_ptr, row, in_rows, codes_ptr, factors_ptr, scales_ptr, mins_ptr, order_ptr, output, in_outputs, inputs,
        groups, x_stride, BITS, ZERO, GROUP, MINS, ORDER, FOLDED, BLOCK_K,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias_ptr + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    offset = row[:, None] * out_stride + output[None, :]
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


@wna16.pack_wna16.implement("triton", device="cuda")
@wna16.pack_gated_wna16.implement("triton", device="cuda")
def pack(parts: Sequence[QuantizedRows], rounded: bool = False) -> PackedWna16:
    """Codes of 4 bits in pairs, the first in the low half; scales and minima of every group as float32."""
    if rounded:
        raise ValueError("pack_wna16: activations are rounded on a CPU only")
    packed = tuple(_pack(part) for part in parts)
    zeros = tuple(0 if part.factors is None else LINEAR.get(part.factors, -1) for part in parts)
    return PackedWna16(sum(part.rows for part in packed), packed[0].columns, packed, handle=zeros)


@wna16.pack_int4.implement("triton", device="cuda")
@wna16.pack_gated_int4.implement("triton", device="cuda")
def pack_int4(
    weight: Tensor, group: int, rounded: bool = False, rows: int | None = None, first: int = 0,
    into: PackedWna16 | None = None,
) -> PackedWna16:  # fmt: skip
    codes, scales = wna16.quantize_int4.reference(weight, group)
    made = pack((QuantizedRows(codes, SIGNED, group, scales),), rounded)
    (part,) = made.parts
    if into is None:
        if rows is None or rows == len(weight):
            return made
        packed, spread = (tensor.new_empty(rows, tensor.shape[1]) for tensor in (part.packed, part.scales))
        into = replace(made, rows=rows, parts=(replace(part, rows=rows, packed=packed, scales=spread),))
    filled = slice(first, first + len(weight))
    into.parts[0].packed[filled], into.parts[0].scales[filled] = part.packed, part.scales
    return into


def _pack(part: QuantizedRows) -> PackedPart:
    (rows, columns), device = part.shape, torch_device()
    codes, bits = part.codes, 8 if part.factors is None else 4
    if bits == 4:
        even = torch.nn.functional.pad(codes, (0, columns % 2))
        codes = even[:, ::2] | even[:, 1::2] << 4
    factors = torch.tensor(part.factors or [0] * 16, dtype=torch.int8)
    scales, mins = part.by_group()
    placed = [
        None if tensor is None else tensor.to(device, copy=True, memory_format=torch.contiguous_format)
        for tensor in (codes, factors, scales, mins, part.order)
    ]
    assert placed[0] is not None and placed[1] is not None and placed[2] is not None
    return PackedPart(
        bits, rows, columns, part.group, 1, placed[0], placed[1], placed[2], None, placed[3], None, placed[4],
        part.folded,
    )  # fmt: skip


def step_of(group: int) -> int:
    """Inputs that are multiplied at once."""
    return next((step for step in STEPS if step <= group), STEPS[-1])


def _multiply(x: Tensor, part: PackedPart, zero: int, bias: Tensor | None, out: Tensor) -> None:
    """out [T,N], whose rows need not be adjacent.  `zero`: as the kernel's ZERO."""
    rows, groups = x.shape[0], part.scales.shape[1]
    config = tuned("linear", x.device.index, rows=rows, outputs=part.rows, bytes=x.element_size())
    block_m, block_n = config["tile"]
    group = min(part.group, part.columns)
    block_k = step_of(group)
    wna16_kernel[triton.cdiv(rows, block_m), triton.cdiv(part.rows, block_n)](
        x, part.packed, part.factors, part.scales, part.scales if part.mins is None else part.mins,
        part.factors if part.order is None else part.order, out if bias is None else bias, out, rows, part.rows,
        part.columns, groups, x.stride(0), out.stride(0), part.bits, zero, group, part.mins is not None,
        part.order is not None, part.folded, bias is not None, block_m, block_n, block_k, num_warps=config["warps"],
        num_stages=config["stages"], **EXACT,
    )  # fmt: skip


@wna16.linear_wna16.implement("triton", device="cuda")
def linear(x: Tensor, packed: PackedWna16, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    out = x.new_empty((x.shape[0], packed.rows), dtype=out_dtype or x.dtype)
    first = 0
    for part, zero in zip(packed.parts, packed.handle, strict=True):
        columns = slice(first, first + part.rows)
        if len(x):
            _multiply(x, part, zero, None if bias is None else bias[columns], out[:, columns])
        first += part.rows
    return out


@wna16.gated_linear_wna16.implement("triton", device="cuda")
def gated_linear(x: Tensor, packed: PackedWna16, bias: Tensor | None, activation: str | None) -> Tensor:
    """Two kernels: the product, then the gate."""
    both = linear(x, packed, bias)
    return both if activation is None else elementwise.gated(both, activation == "gelu_tanh")


@wna16.embedding_wna16.implement("triton", device="cuda")
def embedding(ids: Tensor, packed: PackedWna16, dtype: torch.dtype) -> Tensor:
    """The weight is in one part."""
    (part,) = packed.parts
    codes, group = part.packed[ids], part.group
    if part.bits == 8:
        values = codes.view(torch.int8).float()
    else:
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : part.columns]
        values = part.factors[pairs.long()].float()
    values = values * part.scales[ids].repeat_interleave(group, 1)[:, : part.columns]
    if part.mins is not None:
        values = values + part.mins[ids].repeat_interleave(group, 1)[:, : part.columns]
    return values.to(dtype)
