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

from tokserve.gpu.kernels import elementwise
from tokserve.gpu.kernels.launch import EXACT, cdiv, torch_device, tuned
from tokserve.gpu.kernels.sums import tree_sums
from tokserve.ops import float8, wna16
from tokserve.ops.wna16 import SIGNED, UNSIGNED, PackedPart, PackedWna16, QuantizedRows

STEPS = (128, 64, 32, 16)  # inputs that are multiplied at once: the most that do not exceed a group
LINEAR = {SIGNED: 8, UNSIGNED: 0}  # factors that are the code less a number


@triton.jit
def wna16_sums(
    x_ptr,
    row,
    in_rows,
    codes_ptr,
    factors_ptr,
    scales_ptr,
    mins_ptr,
    order_ptr,
    output,
    in_outputs,
    inputs,
    groups,
    codes_stride,
    x_stride,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    MINS: tl.constexpr,
    ORDER: tl.constexpr,
    FOLDED: tl.constexpr,
    FLOAT8: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows `row` [M] of x times outputs `output` [N] of a part: [M,N] float32.  ZERO: what is taken from a code; below
    0, codes index the table of factors.  EVEN: BLOCK_K divides GROUP, and that the inputs."""
    PER_BYTE: tl.constexpr = 8 // BITS
    step, byte = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // PER_BYTE)
    code_ptrs = codes_ptr + output[:, None] * codes_stride + byte[None, :]
    total = tl.zeros([row.shape[0], output.shape[0]], tl.float32)
    for group in range(0, groups):
        scale = tl.load(scales_ptr + output * groups + group, mask=in_outputs, other=0.0)
        sums = total
        if not FOLDED and not FLOAT8:
            sums = tl.zeros([row.shape[0], output.shape[0]], tl.float32)
        shift = tl.zeros([row.shape[0]], tl.float32)
        for at_byte in range(0, (GROUP + PER_BYTE - 1) // PER_BYTE, BLOCK_K // PER_BYTE):
            at = at_byte * PER_BYTE
            first = group * GROUP + at
            k = first + step
            inside = (at + step < GROUP) & (k < inputs)
            x_valid, code_valid = in_rows[:, None], in_outputs[:, None]
            if not EVEN:
                x_valid = x_valid & inside[None, :]
                in_bytes = (at + byte * PER_BYTE < GROUP) & (first + byte * PER_BYTE < inputs)
                code_valid = code_valid & in_bytes[None, :]
            column = k
            if ORDER:
                column = tl.load(order_ptr + k, mask=inside, other=0)
            x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=x_valid, other=0.0)
            codes = tl.load(code_ptrs + group * (GROUP // PER_BYTE) + at_byte, mask=code_valid, other=0)
            if FLOAT8:  # the bits of a number of half precision, over 256: also where no instruction converts float8
                bits = codes.to(tl.int32)
                half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.uint16).to(tl.float16, bitcast=True)
                factor = (half.to(tl.float32) * 256.0 * scale[:, None]).to(x.dtype)
            elif BITS == 8:
                factor = codes.to(tl.int8, bitcast=True).to(tl.float32)
            else:
                pair = codes.to(tl.int32)
                codes = tl.reshape(tl.join(pair & 15, pair >> 4), [output.shape[0], BLOCK_K])
                if ZERO < 0:  # noqa: SIM108 - a choice of the compiler's
                    factor = tl.load(factors_ptr + codes).to(tl.float32)
                else:
                    factor = (codes - ZERO).to(tl.float32)
            if FOLDED:
                factor = factor * scale[:, None]
            if MINS:
                shift += tree_sums(x.to(tl.float32))
            if FOLDED and x.dtype == tl.float16:  # which does not hold every power of two
                sums = tl.dot(x.to(tl.float32), tl.trans(factor), sums, input_precision="ieee")
            else:
                sums = tl.dot(x, tl.trans(factor.to(x.dtype)), sums, input_precision="ieee")
        if FOLDED or FLOAT8:
            total = sums
        else:
            total += sums * scale[None, :]
            if MINS:
                low = tl.load(mins_ptr + output * groups + group, mask=in_outputs, other=0.0)
                total += shift[:, None] * low[None, :]
    return total


@triton.jit(do_not_specialize=["rows"])
def wna16_kernel(
    x_ptr,
    codes_ptr,
    factors_ptr,
    scales_ptr,
    mins_ptr,
    order_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outputs,
    inputs,
    groups,
    codes_stride,
    x_stride,
    out_stride,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    MINS: tl.constexpr,
    ORDER: tl.constexpr,
    FOLDED: tl.constexpr,
    FLOAT8: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the output."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_outputs = row < rows, output < outputs
    total = wna16_sums(
        x_ptr,
        row,
        in_rows,
        codes_ptr,
        factors_ptr,
        scales_ptr,
        mins_ptr,
        order_ptr,
        output,
        in_outputs,
        inputs,
        groups,
        codes_stride,
        x_stride,
        BITS,
        ZERO,
        GROUP,
        MINS,
        ORDER,
        FOLDED,
        FLOAT8,
        EVEN,
        BLOCK_K,
    )
    if BIAS:
        total += tl.load(bias_ptr + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    offset = row[:, None] * out_stride + output[None, :]
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


@wna16.quantize_int4.implement("triton", device="cuda")
def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize with torch, on the GPU."""
    return wna16.quantize_int4.reference(weight.to(torch_device()), group)


@wna16.pack_wna16.implement("triton", device="cuda")
@wna16.pack_gated_wna16.implement("triton", device="cuda")
def pack(parts: Sequence[QuantizedRows], rounded: bool = False) -> PackedWna16:
    """Codes of 4 bits in pairs, the first in the low half; scales and minima of every group as float32."""
    if rounded:
        raise ValueError("pack_wna16: activations are rounded on a CPU only")
    for part in parts:
        wna16.check_float8(part, rounded)
    packed = tuple(_pack(part) for part in parts)
    zeros = tuple(0 if part.factors is None else LINEAR.get(part.factors, -1) for part in parts)
    return PackedWna16(sum(part.rows for part in packed), packed[0].columns, packed, handle=zeros)


@wna16.pack_int4.implement("triton", device="cuda")
@wna16.pack_gated_int4.implement("triton", device="cuda")
def pack_int4(
    weight: Tensor,
    group: int,
    rounded: bool = False,
    rows: int | None = None,
    first: int = 0,
    into: PackedWna16 | None = None,
) -> PackedWna16:
    codes, scales = quantize_int4(weight, group)
    packed_weight = pack((QuantizedRows(codes, SIGNED, group, scales),), rounded)
    (part,) = packed_weight.parts
    if into is None:
        if rows is None or rows == len(weight):
            return packed_weight
        packed, spread = (tensor.new_empty(rows, tensor.shape[1]) for tensor in (part.packed, part.scales))
        into = replace(packed_weight, rows=rows, parts=(replace(part, rows=rows, packed=packed, scales=spread),))
    filled = slice(first, first + len(weight))
    into.parts[0].packed[filled], into.parts[0].scales[filled] = part.packed, part.scales
    return into


def _pack(part: QuantizedRows) -> PackedPart:
    (rows, columns), device = part.shape, torch_device()
    codes, bits = part.codes, 8 if part.factors is None else 4
    if bits == 4 and not part.nibbles:
        even = torch.nn.functional.pad(codes, (0, columns % 2))
        codes = even[:, ::2] | even[:, 1::2] << 4
    factors = torch.tensor(part.factors or [0] * 16, dtype=torch.int8)
    scales, mins = part.by_group()
    if part.float8:
        scales = float8.with_marks(part.numbers(), scales.t(), part.group).t()
    placed = [
        None if tensor is None else tensor.to(device, copy=True, memory_format=torch.contiguous_format)
        for tensor in (codes, factors, scales, mins, part.order)
    ]
    assert placed[0] is not None and placed[1] is not None and placed[2] is not None
    return PackedPart(
        bits,
        rows,
        columns,
        part.group,
        1,
        placed[0],
        placed[1],
        placed[2],
        None,
        placed[3],
        None,
        placed[4],
        part.folded,
        float8=part.float8,
    )


def step_of(group: int, dtype: torch.dtype, *, ordered: bool) -> int:
    """Inputs that are multiplied at once: fewer where they are gathered, or are of four bytes."""
    most = STEPS[1] if ordered or dtype == torch.float32 else STEPS[0]
    return next((step for step in STEPS if step <= min(group, most)), STEPS[-1])


def is_even(inputs: int, group: int, step: int) -> bool:
    """Whether steps fill groups, and groups the inputs."""
    return inputs % group == 0 and group % step == 0


def _multiply(x: Tensor, part: PackedPart, zero: int, bias: Tensor | None, out: Tensor) -> None:
    """out [T,N], whose rows need not be adjacent.  `zero`: as the kernel's ZERO."""
    rows, groups = x.shape[0], part.scales.shape[1]
    config = tuned("wna16", x.device.index, rows=rows, outputs=part.rows)
    block_m, block_n = config["tile"]
    group = min(part.group, part.columns)
    block_k = step_of(group, x.dtype, ordered=part.order is not None)
    wna16_kernel[cdiv(rows, block_m), cdiv(part.rows, block_n)](
        x,
        part.packed,
        part.factors,
        part.scales,
        part.scales if part.mins is None else part.mins,
        part.factors if part.order is None else part.order,
        out if bias is None else bias,
        out,
        rows,
        part.rows,
        part.columns,
        groups,
        part.packed.stride(0),
        x.stride(0),
        out.stride(0),
        part.bits,
        zero,
        group,
        part.mins is not None,
        part.order is not None,
        part.folded,
        part.float8,
        bias is not None,
        is_even(part.columns, group, block_k),
        block_m,
        block_n,
        block_k,
        num_warps=config["warps"],
        num_stages=config["stages"],
        **EXACT,
    )


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
    return both if activation is None else elementwise.activate(both, activation, True)


@wna16.embedding_wna16.implement("triton", device="cuda")
def embedding(ids: Tensor, packed: PackedWna16, dtype: torch.dtype) -> Tensor:
    """The weight is in one part."""
    (part,) = packed.parts
    codes, group = part.packed[ids], part.group
    if part.bits == 8:
        values = codes.view(torch.float8_e4m3fn if part.float8 else torch.int8).float()
    else:
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, : part.columns]
        values = part.factors[pairs.long()].float()
    values = values * part.scales[ids].repeat_interleave(group, 1)[:, : part.columns]
    if part.mins is not None:
        values = values + part.mins[ids].repeat_interleave(group, 1)[:, : part.columns]
    return values.to(dtype)
