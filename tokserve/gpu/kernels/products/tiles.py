"""Parts of every product: the order of its tiles, what a step adds to a tile's sums, and how these are stored."""

from __future__ import annotations

import triton
import triton.language as tl

BAND = 8  # tiles of rows computed before the next outputs: their inputs stay in the L2 cache


@triton.jit
def tile_start(rows, outputs, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first row and the first output of a program: BAND tiles of rows with the same outputs follow one another."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * tiles_n)
    return (band * BAND + within % height) * BLOCK_M, within // height * BLOCK_N


@triton.jit
def tile_of(rows, outputs, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """All rows and outputs of a program."""
    row, output = tile_start(rows, outputs, BAND, BLOCK_M, BLOCK_N)
    return row + tl.arange(0, BLOCK_M), output + tl.arange(0, BLOCK_N)


@triton.jit
def add_step(
    sums,
    x,
    weight,
    weight_scale_ptr,
    start,
    output,
    outputs,
    width,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """sums [M,N] and the products of one step's inputs, from `start` on: x [M,BLOCK_K] times weight [N,BLOCK_K].

    GROUP > 0: scales are [inputs / GROUP, width]; those of `output` [N], as far as that is below `outputs`, count.
    """
    if GROUP > 0:
        scale = tl.load(weight_scale_ptr + start // GROUP * width + output, mask=output < outputs, other=0.0)
        sums += tl.dot(x, tl.trans(weight)) * scale[None, :]
    elif x.dtype == tl.int8:
        sums = tl.dot(x, tl.trans(weight), sums, out_dtype=tl.int32)
    elif SCALED:
        sums = tl.dot(x, tl.trans(weight), sums, max_num_imprecise_acc=BLOCK_K)
    else:
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    return sums


@triton.jit
def store_product(
    sums,
    out_ptr,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    row,
    output,
    offset,
    valid,
    rows,
    outputs,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A tile's sums times their scales, plus the bias."""
    if SCALED:
        sums = sums.to(tl.float32) * tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
        if GROUP == 0:
            sums = sums * tl.load(weight_scale_ptr + output, mask=output < outputs, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + offset, sums.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def rows_of_tile(starts_ptr, tiles_ptr, EXPERTS: tl.constexpr, E_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of this program's tile (EXPERTS: there is no such tile), the tile's first row, and the end of the
    expert's rows."""
    tile, index = tl.program_id(0), tl.arange(0, E_BLOCK)
    ends = tl.load(tiles_ptr + index, mask=index < EXPERTS, other=1 << 30)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    first_tile = tl.max(tl.where(index < expert, ends, 0), 0)
    is_there = expert < EXPERTS
    start = tl.load(starts_ptr + expert, mask=is_there, other=0) + (tile - first_tile) * BLOCK_M
    return expert, start, tl.load(starts_ptr + expert + 1, mask=is_there, other=0)
