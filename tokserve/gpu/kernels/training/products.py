"""Products of matrices of which either may be transposed: gradients of linear layers.

An element is one chain of the matrix unit over K in ascending order, in tiles of one size, so a row's bits do not
depend on the rows beside it.  Transposes are made on the way to the matrix unit: nothing is copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT, cdiv
from tokserve.gpu.kernels.products.tiles import BAND, tile_of
from tokserve.ops import gradients

TILE = (128, 128, 64)  # rows, columns, and steps of K
FLOAT32_TILE = (32, 64, 32)  # the same in float32, which has no matrix unit


@triton.jit
def matrix_product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    a_row,
    a_column,
    b_row,
    b_column,
    EVEN: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of a [rows,depth] times b [depth,columns], of these strides.  EVEN: BLOCK_K divides depth."""
    row, column = tile_of(rows, columns, BAND, BLOCK_M, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + row.to(tl.int64)[:, None] * a_row + step.to(tl.int64)[None, :] * a_column
    b_ptrs = b_ptr + step.to(tl.int64)[:, None] * b_row + column.to(tl.int64)[None, :] * b_column
    a_valid, b_valid = (row < rows)[:, None], (column < columns)[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            a = tl.load(a_ptrs, mask=a_valid, other=0.0)
            b = tl.load(b_ptrs, mask=b_valid, other=0.0)
        else:
            left = step < depth - start
            a = tl.load(a_ptrs, mask=a_valid & left[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=b_valid & left[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        a_ptrs += BLOCK_K * a_column
        b_ptrs += BLOCK_K * b_row
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_ptr + offset, sums.to(out_ptr.dtype.element_ty), mask=a_valid & b_valid)


@gradients.matrix_product.implement("triton", device="cuda")
def matrix_product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    (rows, depth), columns = a.shape, b.shape[1]
    out = a.new_empty((rows, columns), dtype=out_dtype or a.dtype)
    single = a.dtype == torch.float32
    block_m, block_n, block_k = FLOAT32_TILE if single else TILE
    if rows and columns:
        matrix_product_kernel[(cdiv(rows, block_m) * cdiv(columns, block_n),)](
            a,
            b,
            out,
            rows,
            columns,
            depth,
            *a.stride(),
            *b.stride(),
            depth % block_k == 0,
            BAND,
            block_m,
            block_n,
            block_k,
            num_warps=4 if single else 8,
            num_stages=2 if single else 3,
            **EXACT,
        )
    return out
