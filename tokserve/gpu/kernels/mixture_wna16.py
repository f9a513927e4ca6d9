"""Experts with weights of 4 or 8 bits on the GPU: products of rows sorted by expert, as in `mixture`, with the
arithmetic of `wna16`.

Parts of weights that are of one kind are multiplied in one launch, in which programs of other experts return at once;
where their numbers lie is in tables.  The experts of a layer are of one kind, most often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT, addresses, cdiv, next_power_of_2, tuned
from tokserve.gpu.kernels.mixture import Sorting, activated, mixed, product, tiles_of
from tokserve.gpu.kernels.products.tiles import rows_of_tile
from tokserve.gpu.kernels.wna16 import is_even, step_of, wna16_sums
from tokserve.ops import mixture
from tokserve.ops.dense import PackedWeight
from tokserve.ops.wna16 import PackedPart, PackedWna16


@triton.jit(do_not_specialize=["choices"])
def experts_wna16_kernel(
    x_ptr,
    codes_ptr,
    factors_ptr,
    scales_ptr,
    mins_ptr,
    orders_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    choices,
    outputs,
    inputs,
    groups,
    codes_stride,
    x_stride,
    out_stride,
    bias_stride,
    GATHER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    MINS: tl.constexpr,
    ORDER: tl.constexpr,
    FOLDED: tl.constexpr,
    FLOAT8: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the rows of one expert times a part of its weight.  GATHER > 0: row r of the sorted rows is token
    order[r] // GATHER of x."""
    expert, start, end = rows_of_tile(starts_ptr, tiles_ptr, EXPERTS, E_BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    codes = tl.load(codes_ptr + expert)
    if codes == 0:
        return
    row = start + tl.arange(0, BLOCK_M)
    output = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_outputs = row < end, output < outputs
    source = row
    if GATHER > 0:
        source = tl.load(order_ptr + row, mask=in_rows, other=0) // GATHER
    total = wna16_sums(
        x_ptr,
        source.to(tl.int64),
        in_rows,
        tl.multiple_of(codes.to(tl.pointer_type(tl.uint8)), 16),
        tl.load(factors_ptr + expert).to(tl.pointer_type(tl.int8)),
        tl.load(scales_ptr + expert).to(tl.pointer_type(tl.float32)),
        tl.load(mins_ptr + expert).to(tl.pointer_type(tl.float32)),
        tl.load(orders_ptr + expert).to(tl.pointer_type(tl.int32)),
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
        total += tl.load(bias_ptr + expert * bias_stride + output, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    offset = row.to(tl.int64)[:, None] * out_stride + output[None, :]
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


Kind = tuple[Any, ...]  # first output, what is taken from codes, then of the part: see `_by_kind`


def _by_kind(weights: Sequence[PackedWna16 | PackedWeight]) -> dict[Kind, list[PackedPart | None]]:
    """The integer parts of one kind, and by expert, None for those that have no such part."""
    kinds: dict[Kind, list[PackedPart | None]] = {}
    for expert, weight in enumerate(weights):
        first = 0
        if isinstance(weight, PackedWna16):
            for part, zero in zip(weight.parts, weight.handle, strict=True):
                sizes = (part.bits, part.rows, part.columns, min(part.group, part.columns), part.scales.shape[1])
                kind = (first, zero, *sizes, part.mins is not None, part.order is not None, part.folded, part.float8)
                kinds.setdefault(kind, [None] * len(weights))[expert] = part
                first += part.rows
    return kinds


def _table(tensors: list[Tensor | None], x: Tensor) -> Tensor:
    return addresses(tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors), x.device)


def _product(
    x: Tensor, weights: Sequence[PackedWna16 | PackedWeight], bias: Tensor | None, out: Tensor, sorting: Sorting, k: int
) -> None:
    """out [T * k, N] = the sorted rows of x times their experts' weights; k > 0: x is [T, K], its rows unsorted."""
    choices, count = len(sorting[0]), len(weights)
    floats = [weight if isinstance(weight, PackedWeight) else None for weight in weights]
    if any(floats):
        product(x, floats, bias, out, sorting, k)
    for kind, parts in _by_kind(weights).items():
        first, zero, bits, rows, columns, group, groups, has_mins, has_order, folded, is_float8 = kind
        config = tuned("wna16", x.device.index, rows=-(-choices // count), outputs=rows)
        block_m, block_n = config["tile"]
        step = step_of(group, x.dtype, ordered=has_order)
        tiles, grid_tiles = tiles_of(sorting, block_m)
        stride = next(part.packed.stride(0) for part in parts if part is not None)
        tables = [
            _table([None if part is None else getattr(part, name) for part in parts], x)
            for name in ("packed", "factors", "scales", "mins", "order")
        ]
        of_part, bias_part = out[:, first : first + rows], out if bias is None else bias[:, first : first + rows]
        experts_wna16_kernel[grid_tiles, cdiv(rows, block_n)](
            x,
            *tables,
            bias_part,
            of_part,
            *sorting,
            tiles,
            choices,
            rows,
            columns,
            groups,
            stride,
            x.stride(0),
            out.stride(0),
            bias_part.stride(0),
            k,
            count,
            bits,
            zero,
            group,
            has_mins,
            has_order,
            folded,
            is_float8,
            bias is not None,
            is_even(columns, group, step),
            next_power_of_2(count),
            block_m,
            block_n,
            step,
            num_warps=config["warps"],
            num_stages=config["stages"],
            **EXACT,
        )


@mixture.experts_wna16.implement("triton", device="cuda")
def experts_wna16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[PackedWna16 | PackedWeight],
    gate_up_bias: Tensor | None,
    down: Sequence[PackedWna16 | PackedWeight],
    down_bias: Tensor | None,
    activation: str,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Rows of x need not be adjacent."""

    def up(sorting: Sorting) -> Tensor:
        both = x.new_empty(ids.numel(), gate_up[0].rows)
        _product(x, gate_up, gate_up_bias, both, sorting, ids.shape[1])
        return activated(both, activation)

    def back(inner: Tensor, out: Tensor, sorting: Sorting) -> None:
        _product(inner, down, down_bias, out, sorting, 0)

    return mixed(x, ids, weights, len(gate_up), up, back, shared, shared_gate)
