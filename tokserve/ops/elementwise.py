"""References of norms, rotary embedding and gated activations: one row in, one row out.

Arithmetic is float32 with one rounding at the end, and uses only torch functions whose bits do not depend on an
element's position (+ - * /, exp, tanh, rsqrt, a sum over one row); torch's silu, gelu and sigmoid depend on it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokserve.ops.registry import op
from tokserve.ops.serial import one_thread

TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (1e-6, 8e-3), torch.float16: (1e-6, 1e-3)}
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


@op(tolerance=TOLERANCE)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight for each row of x [T,H]."""
    return _normed(x.float(), weight, eps).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    square = x * x
    with one_thread():  # torch divides one long row between threads
        mean = square.sum(-1, keepdim=True) / x.shape[-1]  # [T,1]
    return x * torch.rsqrt(mean + eps) * weight.float()


@op(tolerance=TOLERANCE)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum x + residual rounded to their dtype), each [T,H]."""
    total = (x.float() + residual.float()).to(x.dtype)
    return _normed(total.float(), weight, eps).to(x.dtype), total


@op(tolerance=TOLERANCE)
def rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first rot_dim elements of each head of q [T,Hq,D] and k [T,Hk,D] by its token's angles.

    table [max_pos, rot_dim] holds cos | sin; element i pairs with i + rot_dim/2.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)  # [T,1,rot/2] each
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat([rotated, x[..., 2 * half :]], -1)


@op(tolerance=TOLERANCE)
def silu_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half of each row of x [T,2I]."""
    gate, up = x.float().chunk(2, -1)  # [T,I] each
    return (gate / (1.0 + torch.exp(-gate)) * up).to(x.dtype)


@op(tolerance=TOLERANCE)
def gelu_mul(x: Tensor) -> Tensor:
    """gelu(first half) * second half of each row of x [T,2I], GELU in its tanh approximation."""
    gate, up = x.float().chunk(2, -1)  # [T,I] each
    inner = (gate + gate * gate * gate * GELU_CUBIC) * GELU_SCALE
    return (gate * 0.5 * (1.0 + torch.tanh(inner)) * up).to(x.dtype)


def gated(both: Tensor, activation: str | None) -> Tensor:
    """The activation of a gated product [T,2I]: `silu_mul` or `gelu_mul` of it; None: the product itself."""
    if activation is None:
        return both
    return (silu_mul if activation == "silu" else gelu_mul).reference(both)
