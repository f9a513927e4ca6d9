"""References of norms, residual additions, rotary embedding and activations: one row in, one row out.

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
NORMAL_RANGE = 5.5  # beyond it the normal distribution function is 0 or 1
NORMAL = (  # (F(x) - 1/2) / x of the normal distribution function F, in powers of s = 2 x^2 / 5.5^2 - 1: the polynomial
    # through the Chebyshev nodes of x^2 in [0, 5.5^2]
    0.12855193,
    -0.06417233,
    0.047737785,
    -0.038793407,
    0.03206743,
    -0.02604037,
    0.020383572,
    -0.01504235,
    0.010167755,
    -0.006700172,
    0.0047183563,
    -0.0025937106,
    0.0006437078,
    -0.0004001958,
    0.00065514818,
    -0.000274066,
)


@op(tolerance=TOLERANCE)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight for each row of x [T,H]."""
    return _normed(widened(x), weight, eps).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """x as references compute with it: in float32, or in float64 if it is that, where gradients are checked."""
    return x if x.dtype == torch.float64 else x.float()


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    square = x * x
    with one_thread():  # torch divides one long row between threads
        mean = square.sum(-1, keepdim=True) / x.shape[-1]  # [T,1]
    return x * torch.rsqrt(mean + eps) * widened(weight)


@op(tolerance=TOLERANCE)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum x * multiplier + residual rounded to their dtype), each [T,H]."""
    total = add_residual.reference(x, residual, multiplier)
    return _normed(total.float(), weight, eps).to(x.dtype), total


@op(tolerance=TOLERANCE)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias for each row of x [T,H]."""
    return _centered(x.float(), weight, bias, eps).to(x.dtype)


def _centered(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    with one_thread():
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    normed = _normed(x, weight, eps)
    return normed if bias is None else normed + bias.float()


@op(tolerance=TOLERANCE)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(layer_norm of the sum, the sum x * multiplier + residual rounded to their dtype), each [T,H]."""
    total = add_residual.reference(x, residual, multiplier)
    return _centered(total.float(), weight, bias, eps).to(x.dtype), total


@op(tolerance=TOLERANCE)
def add_residual(x: Tensor, residual: Tensor, multiplier: float = 1.0) -> Tensor:
    """x * multiplier + residual, both [T,H], in float32, rounded to their dtype once."""
    return (x.float() * multiplier + residual.float()).to(x.dtype)


@op(tolerance={torch.float32: (4e-6, 2e-6), torch.bfloat16: (1e-6, 8e-3), torch.float16: (4e-6, 1e-3)})
def cap(x: Tensor, multiplier: float, limit: float) -> Tensor:
    """limit * tanh(x * multiplier / limit) for x [T,H]; limit 0: x * multiplier."""
    scaled = x.float() * multiplier
    return (scaled if limit == 0.0 else torch.tanh(scaled / limit) * limit).to(x.dtype)


@op(tolerance=TOLERANCE)
def scale_by_position(x: Tensor, positions: Tensor, growth: float, period: int, first: int = 0) -> Tensor:
    """Heads x [T,H,D] times 1 + growth * log(1 + n), where n is the whole part of (position + first) / period."""
    factors = [1.0 + growth * math.log(1 + (position + first) // period) for position in positions.tolist()]
    return (x.float() * torch.tensor(factors)[:, None, None]).to(x.dtype)


@op(tolerance=TOLERANCE)
def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """Each row of x [T,H] times its factor, or the one of all; factors float32 [T] or [1]."""
    return (x.float() * factors[:, None]).to(x.dtype)


@op(tolerance=TOLERANCE)
def norm_values(x: Tensor, heads: int, dim: int, eps: float, copied: bool = False) -> Tensor:
    """x [T,N], whose last elements are heads of `dim`, with `rms_norm` of each of these without a weight; `copied`: x,
    and behind it what would be in their place: [T,N+heads*dim]."""
    size = heads * dim
    normed = rms_norm.reference(x[:, -size:].reshape(-1, dim), torch.ones(dim), eps).view(len(x), size)
    return torch.cat((x if copied else x[:, :-size], normed), 1)


@op(tolerance={torch.float32: (3e-6, 2e-6), torch.bfloat16: (3e-6, 8e-3), torch.float16: (3e-6, 1e-3)})
def gate_inputs(x: Tensor, inputs: Tensor, layer: int, activation: str) -> Tensor:
    """The activation of x [T,I] times inputs[:, layer * I : (layer + 1) * I] of [T,L*I]; activations as `activate`."""
    width = x.shape[1]
    return (_active(widened(x), activation) * widened(inputs[:, layer * width : (layer + 1) * width])).to(x.dtype)


@op(tolerance=TOLERANCE)
def rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the first rot_dim elements of each head of q [T,Hq,D] and k [T,Hk,D] by its token's angles.

    table [max_pos, rot_dim] holds cos | sin; element i pairs with i + rot_dim/2; `interleaved`: 2i pairs with 2i + 1.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)  # [T,1,rot/2] each
    return rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Heads x [T,H,D] turned by angles [T,1,rot/2], in x's dtype."""
    rot = 2 * cos.shape[-1]
    turning = x[..., :rot].float()
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, -1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = (torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)).to(x.dtype)
    return turned if rot == x.shape[-1] else torch.cat([turned, x[..., rot:]], -1)


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


@op(tolerance={torch.float32: (3e-6, 2e-6), torch.bfloat16: (3e-6, 8e-3), torch.float16: (3e-6, 1e-3)})
def activate(x: Tensor, activation: str, gated: bool = False) -> Tensor:
    """The activation of x [T,I]; `gated`: of the first half of x [T,2I], times the second.

    `activation`: "silu", "gelu_tanh", "gelu" (with the error function), "relu", or "relu2", its square.
    """
    if not gated:
        return _active(widened(x), activation).to(x.dtype)
    gate, up = widened(x).chunk(2, -1)
    return (_active(gate, activation) * up).to(x.dtype)


def _active(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return x / (1.0 + torch.exp(-x))
    if activation == "gelu_tanh":
        return x * 0.5 * (1.0 + torch.tanh((x + x * x * x * GELU_CUBIC) * GELU_SCALE))
    if activation == "gelu":
        return _gelu(x)
    if activation not in ("relu", "relu2"):
        raise ValueError(f"activate: unknown activation {activation!r}")
    positive = torch.where(x < 0.0, 0.0, x)
    return positive * positive if activation == "relu2" else positive


def _gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function at x; the error is below 2e-7 of x."""
    near = x.clamp(-NORMAL_RANGE, NORMAL_RANGE)
    square = near * near * (2.0 / NORMAL_RANGE**2) - 1.0
    p = torch.full_like(x, NORMAL[-1])
    for coefficient in reversed(NORMAL[:-1]):
        p = p * square + coefficient
    return torch.where(x < -NORMAL_RANGE, 0.0, x * (near * p + 0.5))


def gated(both: Tensor, activation: str | None) -> Tensor:
    """The activation of a gated product [T,2I]: `silu_mul` or `gelu_mul` of it; None: the product itself."""
    if activation is None:
        return both
    return (silu_mul if activation == "silu" else gelu_mul).reference(both)
