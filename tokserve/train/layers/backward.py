"""Gradients of the ops, as plain functions of tensors.

All sums are float32.  Products of matrices are the ops' own `linear`, whose sums have one order whatever the number of
rows and threads: a row's gradient does not depend on the rows beside it.  (`products` replaces those of weights by
torch's where these are faster.)  Elementwise parts go over PIECE rows at a time, which stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tokserve import ops

PIECE = 128  # rows of an elementwise part


def pieces(count: int, size: int = PIECE) -> Iterator[slice]:
    """Slices of `size` rows that cover `count`."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def times_transposed(x: Tensor, matrix: Tensor) -> Tensor:  # [M, K], [N, K] -> [M, N] float32
    """x matrix^T, one chain over K for each element.  A transposed matrix is packed as it is, without a copy."""
    matrix = matrix if 1 in matrix.stride() else matrix.contiguous()
    return ops.linear(x, ops.pack_linear(matrix), None, torch.float32)


def linear_input(grad: Tensor, weights: Sequence[Tensor]) -> Tensor:  # [T, N], each [n, K] -> [T, K] of grad's dtype
    """The gradient of x in x W^T, where `weights` are W's rows in order; they are rounded to grad's dtype."""
    rounded = [weight.to(grad.dtype).contiguous() for weight in weights]
    return ops.linear(grad, ops.pack_linear((rounded[0] if len(rounded) == 1 else torch.cat(rounded)).t()), None)


def linear_weight(grad: Tensor, x: Tensor) -> Tensor:  # [T, N], [T, K] -> [N, K] float32
    """The gradient of W in x W^T: a sum over tokens in ascending order.  Both have contiguous rows.  One of the
    operands has to be transposed: here the smaller one, and the result too if that is x."""
    tokens, outputs, inputs = len(grad), grad.shape[1], x.shape[1]
    if tokens * outputs > (tokens + outputs) * inputs:
        return times_transposed(x.t().contiguous(), grad.t()).t().contiguous()
    return times_transposed(grad.t().contiguous(), x.t())


def summed(rows: Tensor, places: Tensor, count: int) -> Tensor:  # [T, H] float32, [T] int64 -> [count, H]
    """Rows added up by place, in their order."""
    return torch.ops.aten.embedding_dense_backward(rows, places, count, -1, False)


def rope(
    grad_q: Tensor, grad_k: Tensor, table: Tensor, positions: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:  # [T, heads, D] each -> same
    """The gradients of what `ops.rope` turned: turned back."""
    cos, sin = table.index_select(0, positions).chunk(2, -1)  # [T, rot / 2] each
    rows = torch.arange(len(positions), device=positions.device)
    return ops.rope(grad_q, grad_k, torch.cat([cos, -sin], -1), rows, interleaved)
