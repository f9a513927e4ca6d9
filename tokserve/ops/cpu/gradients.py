"""The C++ implementations of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import gradients
from tokserve.ops.cpu import dense


@gradients.matrix_product.implement("cpp", device="cpu")
def matrix_product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """A transposed b is packed as it is.  Rows of a have to lie together: if its columns do, what is copied is a, or b
    and the result, which is then that of the transposes."""
    (outputs, depth), width = a.shape, b.shape[1]
    if a.stride(-1) == 1:
        return _times_transposed(a, b.t(), out_dtype)
    if depth * outputs > (depth + outputs) * width:
        return _times_transposed(b.t().contiguous(), a, out_dtype).t().contiguous()
    return _times_transposed(a.contiguous(), b.t(), out_dtype)


def _times_transposed(x: Tensor, matrix: Tensor, out_dtype: torch.dtype | None) -> Tensor:  # [M, K], [N, K] -> [M, N]
    matrix = matrix if 1 in matrix.stride() else matrix.contiguous()
    return dense.linear(x, dense.pack_linear(matrix), None, out_dtype)


@gradients.activation_gradients.implement("cpp", device="cpu")
def activation_gradients(grad: Tensor, x: Tensor, activation: str, gated: bool = False) -> Tensor:
    out = torch.empty_like(x)
    _C.activation_gradients(grad, x, activation, gated, out)
    return out


@gradients.norm_gradients.implement("cpp", device="cpu")
def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carried: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, grad_weight = torch.empty_like(x), torch.empty(len(weight))
    _C.norm_gradients(grad, x, weight.float(), eps, carried, out, grad_weight)
    return out, grad_weight


@gradients.attention_gradients.implement("cpp", device="cpu")
def attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    paths: Tensor,
    path_start: Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors may be slices of one tensor [T, ...]."""
    grad_q = torch.empty(q.shape)
    grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)
    _C.attention_gradients(
        grad, q, k, v, query_start, paths, path_start, scale, window, softcap, grad_q, grad_k, grad_v
    )
    return grad_q, grad_k, grad_v
