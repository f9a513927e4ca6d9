"""Norms, rotary embedding and gated activations, as torch says them: one row in, one row out.

Arithmetic is float32 inside with one rounding at the end, made only of torch functions whose bits do not
depend on where an element lies (+ - * /, exp, tanh, rsqrt, a sum over one row; torch's own silu, gelu and
sigmoid do depend on it).  This file must not know layers, models or where a tensor came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tokserve.ops.registry import normal, op
from tokserve.ops.serial import one_thread

TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (1e-6, 8e-3), torch.float16: (1e-6, 1e-3)}
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


def _norm_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for rows, width, scale in (
        (1, 64, 1.0),
        (5, 192, 30.0),
        (3, 257, 1e-3),
        (70, 128, 1.0),
        (2, 4096, 3.0),
        (4, 1, 1.0),
    ):
        yield normal(dtype, width, rows, width) * scale, normal(dtype, width + 1, width), 1e-6
    yield torch.zeros(2, 96, dtype=dtype), torch.ones(96, dtype=dtype), 1e-5


@op(samples=_norm_samples, tolerance=TOLERANCE)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight for each row of x [T,H]."""
    return _normed(x.float(), weight, eps).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    square = x * x
    with one_thread():  # torch cuts one long row by the number of threads
        mean = square.sum(-1, keepdim=True) / x.shape[-1]  # [T,1]
    return x * torch.rsqrt(mean + eps) * weight.float()


def _add_norm_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for x, weight, eps in _norm_samples(dtype):
        yield x, normal(dtype, 7, *x.shape), weight, eps


@op(samples=_add_norm_samples, tolerance=TOLERANCE)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum x + residual rounded to their dtype), each [T,H]."""
    total = (x.float() + residual.float()).to(x.dtype)
    return _normed(total.float(), weight, eps).to(x.dtype), total


def _rope_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for tokens, heads, kv_heads, dim, rot in (
        (1, 4, 2, 64, 64),
        (7, 3, 1, 32, 16),
        (33, 8, 8, 80, 32),
        (2, 2, 1, 128, 128),
    ):
        angles = torch.arange(97.0)[:, None] * (10000.0 ** (-torch.arange(rot // 2) * 2.0 / rot))
        table = torch.cat([angles.cos(), angles.sin()], -1)
        positions = torch.randint(0, 97, (tokens,), generator=torch.Generator().manual_seed(tokens))
        yield normal(dtype, 1, tokens, heads, dim), normal(dtype, 2, tokens, kv_heads, dim), table, positions


@op(samples=_rope_samples, tolerance=TOLERANCE)
def rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first rot_dim elements of each head of q [T,Hq,D] and k [T,Hk,D] by its token's angles.

    table [max_pos, rot_dim] holds cos | sin; element i pairs with i + rot_dim/2.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)  # [T,1,rot/2] each
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat([turned, x[..., 2 * half :]], -1)


def _gate_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for rows, width in ((1, 512), (5, 33), (70, 128), (3, 1)):
        yield (normal(dtype, width, rows, 2 * width) * 4,)
    yield (torch.tensor([[-200.0, -20.0, 0.0, 20.0, 200.0, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype),)


@op(samples=_gate_samples, tolerance=TOLERANCE)
def silu_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half of each row of x [T,2I]."""
    gate, up = x.float().chunk(2, -1)  # [T,I] each
    return (gate / (1.0 + torch.exp(-gate)) * up).to(x.dtype)


@op(samples=_gate_samples, tolerance=TOLERANCE)
def gelu_mul(x: Tensor) -> Tensor:
    """gelu(first half) * second half of each row of x [T,2I], GELU in its tanh approximation."""
    gate, up = x.float().chunk(2, -1)  # [T,I] each
    inner = (gate + gate * gate * gate * GELU_CUBIC) * GELU_SCALE
    return (gate * 0.5 * (1.0 + torch.tanh(inner)) * up).to(x.dtype)


def gated_samples(products: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Samples of a gated product, of those (x, weight, bias, out_dtype) of the plain one that can be gated."""
    for number, (x, weight, bias, out_dtype) in enumerate(products):
        if out_dtype is None and len(weight) % 2 == 0:
            yield x, weight, bias, "gelu_tanh" if number % 2 else "silu"
            yield x, weight, bias, None


def gated(both: Tensor, activation: str | None) -> Tensor:
    """What a gated product [T,2I] ends in: `silu_mul` or `gelu_mul` of it; None: the product itself."""
    if activation is None:
        return both
    return (silu_mul if activation == "silu" else gelu_mul).reference(both)
