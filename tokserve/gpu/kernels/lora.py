"""LoRA on the GPU: two products for tiles of rows, for each adapter in the tile.

The inner product is taken over fixed blocks of K, whose sums the outer one adds in ascending order.  Both have one tile
shape for all numbers of rows, so the other rows of a tile do not change a row's chain.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT, cdiv, next_power_of_2
from tokserve.ops.lora import add_lora as add_lora_op

BLOCK_T, BLOCK_N, BLOCK_K = 16, 64, 64  # rows and outputs of a tile, inputs of a step
MAX_BLOCK_R = 64  # ranks at a time
SPLIT = 512  # inputs of one partial sum; part of the arithmetic, like BLOCK_K


@triton.jit(do_not_specialize=["rows", "slots", "shards"], do_not_specialize_on_alignment=["ranks_ptr"])
def lora_down_kernel(
    x_ptr,
    adapters_ptr,
    down_ptr,
    ranks_ptr,
    partial_ptr,
    rows,
    inputs,
    rank,
    slots,
    shards,
    x_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """x down^T over one block of K, for a tile of rows and a part of the rank."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    begin = tl.program_id(1) * SPLIT
    first = tl.program_id(2) * BLOCK_R
    r = first + tl.arange(0, BLOCK_R)
    step = tl.arange(0, BLOCK_K)
    adapter = tl.load(adapters_ptr + row, mask=row < rows, other=-1)
    for slot in range(slots):
        selected = adapter == slot
        if tl.sum(selected.to(tl.int32), 0) > 0:
            used = tl.load(ranks_ptr + slot * shards)
            if first < used:
                sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for start in range(begin, tl.minimum(begin + SPLIT, inputs), BLOCK_K):
                    k = start + step
                    x = tl.load(
                        x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :],
                        mask=selected[:, None] & (k < inputs)[None, :],
                        other=0.0,
                    )
                    weight = tl.load(
                        down_ptr + (slot * shards * rank + r).to(tl.int64)[:, None] * inputs + k[None, :],
                        mask=(r < used)[:, None] & (k < inputs)[None, :],
                        other=0.0,
                    )
                    sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
                offset = (tl.program_id(1) * rows + row).to(tl.int64)[:, None] * rank + r[None, :]
                tl.store(partial_ptr + offset, sums, mask=selected[:, None] & (r < used)[None, :])


@triton.jit(do_not_specialize=["rows", "slots", "shards"], do_not_specialize_on_alignment=["ranks_ptr", "scales_ptr"])
def lora_up_kernel(
    partial_ptr,
    adapters_ptr,
    up_ptr,
    ranks_ptr,
    scales_ptr,
    out_ptr,
    rows,
    outputs,
    rank,
    slots,
    shards,
    splits,
    up_stride,
    out_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out += scale * (sum of the blocks) up, for a tile of rows and outputs."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    adapter = tl.load(adapters_ptr + row, mask=row < rows, other=-1)
    for slot in range(slots):
        selected = adapter == slot
        if tl.sum(selected.to(tl.int32), 0) > 0:
            used = tl.load(ranks_ptr + slot * shards)
            scale = tl.load(scales_ptr + slot * shards)
            sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
            for first in range(0, used, BLOCK_R):
                r = first + tl.arange(0, BLOCK_R)
                inner = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for split in range(splits):
                    offset = (split * rows + row).to(tl.int64)[:, None] * rank + r[None, :]
                    inner += tl.load(partial_ptr + offset, mask=selected[:, None] & (r < used)[None, :], other=0.0)
                weight = tl.load(
                    up_ptr + (slot * rank + r).to(tl.int64)[:, None] * up_stride + output[None, :],
                    mask=(r < used)[:, None] & (output < outputs)[None, :],
                    other=0.0,
                )
                sums = tl.dot(inner * scale, weight.to(tl.float32), sums, input_precision="ieee")
            if used > 0:
                target = out_ptr + row.to(tl.int64)[:, None] * out_stride + output[None, :]
                valid = selected[:, None] & (output < outputs)[None, :]
                before = tl.load(target, mask=valid, other=0.0).to(tl.float32)
                tl.store(target, (before + sums).to(out_ptr.dtype.element_ty), mask=valid)


@add_lora_op.implement("triton", device="cuda")
def add_lora(
    out: Tensor,
    x: Tensor,
    adapters: Tensor,
    down: Tensor,
    up: Tensor,
    ranks: Tensor,
    scales: Tensor,
    sizes: tuple[int, ...],
) -> None:
    rows, inputs = x.shape
    slots, shards, rank, _ = down.shape
    if rows == 0:
        return
    tiles, splits = cdiv(rows, BLOCK_T), cdiv(inputs, SPLIT)
    block_r = max(16, min(MAX_BLOCK_R, next_power_of_2(rank)))
    partial = x.new_empty((splits, rows, rank), dtype=scales.dtype)
    first = 0
    for shard, size in enumerate(sizes):
        lora_down_kernel[(tiles, splits, cdiv(rank, block_r))](
            x,
            adapters,
            down[:, shard],
            ranks[:, shard],
            partial,
            rows,
            inputs,
            rank,
            slots,
            shards,
            x.stride(0),
            BLOCK_T,
            BLOCK_K,
            block_r,
            SPLIT,
            num_warps=4,
            **EXACT,
        )
        lora_up_kernel[(tiles, cdiv(size, BLOCK_N))](
            partial,
            adapters,
            up[:, :, first:],
            ranks[:, shard],
            scales[:, shard],
            out[:, first:],
            rows,
            size,
            rank,
            slots,
            shards,
            splits,
            up.stride(1),
            out.stride(0),
            BLOCK_T,
            BLOCK_N,
            block_r,
            num_warps=4,
            **EXACT,
        )
        first += size
