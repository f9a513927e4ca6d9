"""Sums of floats in an order that is written out, so that it is the same in every layout, with any number of warps and
with any version of the compiler: kernels that compute the same sum in different surroundings have the same bits.

`tl.sum` over two elements is one addition; of more, its order is the compiler's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tree_sum(x):
    """The sum of x [N], N a power of two: neighbours are added, then the sums of neighbours, and so on."""
    SIZE: tl.constexpr = x.shape[0]
    for level in tl.static_range(20):
        if SIZE >> level > 1:
            x = tl.sum(tl.reshape(x, [SIZE >> (level + 1), 2]), 1)
    return tl.sum(x, 0)


@triton.jit
def tree_sums(x):
    """`tree_sum` of each row of x [M,N]: [M]."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    for level in tl.static_range(20):
        if SIZE >> level > 1:
            x = tl.sum(tl.reshape(x, [ROWS, SIZE >> (level + 1), 2]), 2)
    return tl.sum(x, 1)


@triton.jit
def strided_sums(x):
    """The sums of rows of x [M,N], N a power of two from 8 on: of pairs, of every fourth pair as a tree, of these four.

    In what the matrix unit leaves, a thread has every fourth pair of a row.
    """
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1] // 8
    x = tl.sum(tl.reshape(x, [ROWS, SIZE, 4, 2]), 3)
    for level in tl.static_range(20):
        if SIZE >> level > 1:
            x = tl.sum(tl.reshape(x, [ROWS, SIZE >> (level + 1), 2, 4]), 2)
    return tree_sums(tl.reshape(x, [ROWS, 4]))
