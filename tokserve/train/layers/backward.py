"""Gradients of the ops, as plain functions of tensors.

All sums are float32.  Products of matrices are the ops' own, whose sums have one order whatever the number of rows and
threads: a row's gradient does not depend on the rows beside it.  (`products` replaces those of weights by
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


def linear_input(grad: Tensor, weights: Sequence[Tensor]) -> Tensor:  # [T, N], each [n, K] -> [T, K] of grad's dtype
    """The gradient of x in x W^T, where `weights` are W's rows in order; they are rounded to grad's dtype."""
    rounded = [weight.to(grad.dtype).contiguous() for weight in weights]
    return ops.matrix_product(grad, rounded[0] if len(rounded) == 1 else torch.cat(rounded))


def linear_weight(grad: Tensor, x: Tensor) -> Tensor:  # [T, N], [T, K] -> [N, K] float32
    """The gradient of W in x W^T: a sum over tokens in ascending order.  Both have contiguous rows."""
    return ops.matrix_product(grad.t(), x, torch.float32)


def rope(
    grad_q: Tensor, grad_k: Tensor, table: Tensor, positions: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:  # [T, heads, D] each -> same
    """The gradients of what `ops.rope` turned: turned back."""
    cos, sin = table.index_select(0, positions).chunk(2, -1)  # [T, rot / 2] each
    rows = torch.arange(len(positions), device=positions.device)
    return ops.rope(grad_q, grad_k, torch.cat([cos, -sin], -1), rows, interleaved)
