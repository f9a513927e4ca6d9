"""Sums of floats in an order that is written out, so that it is the same in every layout, with any number of warps and
with any version of the compiler: kernels that compute the same sum in different surroundings have the same bits.

`tl.sum` over two elements is one addition; of more, its order is the compiler's.  Parts of softmaxes, which are sums,
too, merge by operations on elements alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))


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


@triton.jit
def finite(row_max):
    """-inf (no key visible) becomes 0, so that exp2(-inf - row_max) is 0 and not NaN."""
    return tl.where(row_max == NEG_INF, 0.0, row_max)


@triton.jit
def merge(acc, row_max, row_sum, part, part_max, part_sum):
    """Merge two partial softmaxes.  One without keys changes no bit of the other."""
    new_max = tl.maximum(row_max, part_max)
    rescale, part_rescale = tl.exp2(row_max - finite(new_max)), tl.exp2(part_max - finite(new_max))
    return (
        acc * tl.expand_dims(rescale, -1) + part * tl.expand_dims(part_rescale, -1),
        new_max,
        row_sum * rescale + part_sum * part_rescale,
    )


@triton.jit
def with_sink(acc, row_max, row_sum, sink):
    """Add a score, in units of powers of two, whose value is zero."""
    new_max = tl.maximum(row_max, sink)
    rescale = tl.exp2(row_max - new_max)
    return acc * rescale[:, None], row_sum * rescale + tl.exp2(sink - new_max)
