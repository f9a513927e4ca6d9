"""Gradients of mixtures of experts: products of rows sorted by expert, of routers, and sums of products by row.

An element of a product is one chain of the matrix unit over its depth in ascending order, in tiles of one size: a row's
bits depend neither on the rows beside it nor on how many its expert has.  The gradient of an expert's weight is a chain
over its rows in their order.  The number of programs follows from shapes, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT, addresses, cdiv, next_power_of_2, warps
from tokserve.gpu.kernels.mixture import tiles_of
from tokserve.gpu.kernels.products.tiles import rows_of_tile
from tokserve.gpu.kernels.sums import tree_sum
from tokserve.gpu.kernels.training.products import FLOAT32_TILE, TILE
from tokserve.ops import gradients, mixture

WIDEST = 4096  # elements of a row at a time


@triton.jit
def expert_products_kernel(
    x_ptr,
    weights_ptr,
    out_ptr,
    starts_ptr,
    tiles_ptr,
    columns,
    depth,
    weight_row,
    weight_column,
    EXPERTS: tl.constexpr,
    EVEN: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the rows of one expert [rows,depth] times its weight [depth,columns], of these strides.  EVEN: BLOCK_K
    divides depth."""
    expert, start, end = rows_of_tile(starts_ptr, tiles_ptr, EXPERTS, E_BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    row, column = start + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    weight_ptr = tl.multiple_of(tl.load(weights_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * depth + step[None, :]
    w_ptrs = weight_ptr + step.to(tl.int64)[:, None] * weight_row + column.to(tl.int64)[None, :] * weight_column
    x_valid, w_valid = (row < end)[:, None], (column < columns)[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, depth, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs, mask=x_valid, other=0.0)
            weight = tl.load(w_ptrs, mask=w_valid, other=0.0)
        else:
            left = step < depth - at
            x = tl.load(x_ptrs, mask=x_valid & left[None, :], other=0.0)
            weight = tl.load(w_ptrs, mask=w_valid & left[:, None], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * weight_row
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_ptr + offset, sums.to(out_ptr.dtype.element_ty), mask=x_valid & w_valid)


@gradients.expert_products.implement("triton", device="cuda")
def expert_products(
    x: Tensor, weights: Sequence[Tensor], starts: Tensor, transposed: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    x, (rows, depth) = x.contiguous(), x.shape
    weight = weights[0].t() if transposed else weights[0]
    columns, count = weight.shape[1], len(weights)
    out = x.new_empty((rows, columns), dtype=out_dtype or x.dtype)
    single = x.dtype == torch.float32
    block_m, block_n, block_k = FLOAT32_TILE if single else TILE
    if rows and columns:
        tiles, most = tiles_of((x, starts), block_m)
        expert_products_kernel[(most, cdiv(columns, block_n))](
            x,
            addresses(tuple(one.data_ptr() for one in weights), x.device),
            out,
            starts,
            tiles,
            columns,
            depth,
            *weight.stride(),
            count,
            depth % block_k == 0,
            next_power_of_2(count),
            block_m,
            block_n,
            block_k,
            num_warps=4 if single else 8,
            num_stages=2 if single else 3,
            **EXACT,
        )
    return out


@triton.jit
def expert_weights_kernel(
    grad_ptr,
    x_ptr,
    out_ptr,
    starts_ptr,
    outputs,
    inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of one expert's [outputs,inputs]: a sum over its rows of grad times x; zero if it has none."""
    expert, tile, across = tl.program_id(1), tl.program_id(0), tl.cdiv(inputs, BLOCK_N)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    output = tile // across * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output, is_column = output < outputs, column < inputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        is_row, place = row < end, row.to(tl.int64)
        grad = tl.load(
            grad_ptr + place[None, :] * outputs + output[:, None], mask=is_row[None, :] & is_output[:, None], other=0.0
        )
        x = tl.load(
            x_ptr + place[:, None] * inputs + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
        )
        sums = tl.dot(grad, x, sums, input_precision="ieee")
    offset = (expert.to(tl.int64) * outputs + output)[:, None] * inputs + column[None, :]
    tl.store(out_ptr + offset, sums, mask=is_output[:, None] & is_column[None, :])


@gradients.expert_weight_gradients.implement("triton", device="cuda")
def expert_weight_gradients(grad: Tensor, x: Tensor, starts: Tensor) -> Tensor:
    grad, x, outputs, inputs, count = grad.contiguous(), x.contiguous(), grad.shape[1], x.shape[1], len(starts) - 1
    out = x.new_empty((count, outputs, inputs), dtype=torch.float32)
    single = x.dtype == torch.float32
    block_m, block_n, block_k = FLOAT32_TILE if single else TILE
    expert_weights_kernel[(cdiv(outputs, block_m) * cdiv(inputs, block_n), count)](
        grad,
        x,
        out,
        starts,
        outputs,
        inputs,
        block_m,
        block_n,
        block_k,
        num_warps=4 if single else 8,
        num_stages=2 if single else 3,
        **EXACT,
    )
    return out


@triton.jit
def row_products_kernel(a_ptr, b_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """One row: strided partial sums over blocks, then their tree."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        a = tl.load(a_ptr + row * width + start + column, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * width + start + column, mask=inside, other=0.0).to(tl.float32)
        total += a * b
    tl.store(out_ptr + row, tree_sum(total))


@gradients.row_products.implement("triton", device="cuda")
def row_products(a: Tensor, b: Tensor) -> Tensor:
    (rows, width), out = a.shape, a.new_empty(len(a), dtype=torch.float32)
    if rows:
        block = min(WIDEST, int(next_power_of_2(width)))
        row_products_kernel[(rows,)](a.contiguous(), b.contiguous(), out, width, block, num_warps=warps(block), **EXACT)
    return out


@triton.jit
def route_gradients_kernel(
    grad_ptr,
    logits_ptr,
    ids_ptr,
    out_ptr,
    added,
    scale,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    MIN_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: the gradient of its logits from those of the weights of its choices."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < EXPERTS
    logits = tl.load(logits_ptr + token * EXPERTS + index, mask=inside, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tree_sum(powers)
    upstream, chosen = tl.zeros([BLOCK], tl.float32), index < 0
    total, along = 0.0, 0.0
    for choice in tl.static_range(K):
        is_choice = index == tl.load(ids_ptr + token * K + choice)
        grad = tl.load(grad_ptr + token * K + choice) * scale
        upstream, chosen = tl.where(is_choice, grad, upstream), chosen | is_choice
        if NORMALIZE:
            score = tl.sum(tl.where(is_choice, scores, 0.0), 0)
            total += score
            along += grad * score
    if NORMALIZE:
        total += added
        if total > MIN_SUM:
            upstream -= along / total
        upstream = upstream / tl.maximum(total, MIN_SUM)
    upstream = tl.where(chosen, upstream, 0.0)
    out = upstream * scores * (1.0 - scores) if SIGMOID else scores * (upstream - tree_sum(upstream * scores))
    tl.store(out_ptr + token * EXPERTS + index, out, mask=inside)


@gradients.route_gradients.implement("triton", device="cuda")
def route_gradients(
    grad: Tensor, logits: Tensor, ids: Tensor, sigmoid: bool, normalize: bool, added: float, scale: float
) -> Tensor:
    (tokens, experts), out = logits.shape, torch.empty_like(logits, memory_format=torch.contiguous_format)
    if tokens:
        block = int(next_power_of_2(experts))
        route_gradients_kernel[(tokens,)](
            grad.contiguous(),
            logits.contiguous(),
            ids.contiguous(),
            out,
            float(added),
            float(scale),
            experts,
            ids.shape[1],
            sigmoid,
            normalize,
            mixture.MIN_SUM,
            block,
            num_warps=warps(block),
            **EXACT,
        )
    return out
