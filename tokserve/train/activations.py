"""Activations, gated or not, with a gradient."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.layers.quant import gated as gated_product
from tokserve.train import backward


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """The activation of x [T, I]; `gated`: of the first half of x [T, 2 I], times the second."""
    return cast(Tensor, _Activate.apply(x, activation, gated))  # type: ignore[no-untyped-call]


def gradient(grad: Tensor, x: Tensor, activation: str, *, gated: bool) -> Tensor:  # of x, in its dtype
    """From the gradient of the result [T, I]."""
    if gated and activation in ("silu", "gelu_tanh"):
        return (backward.silu_mul if activation == "silu" else backward.gelu_mul)(grad, x)
    inner = grad.shape[1]
    out = torch.empty_like(x)
    for rows in backward.pieces(len(grad)):
        upstream, values = grad[rows].float(), x[rows, :inner].float()
        value, slope = _with_slope(values, activation)
        if gated:
            out[rows, inner:] = upstream * value
            slope = slope * x[rows, inner:]
        out[rows, :inner] = upstream * slope
    return out


def _with_slope(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation of x, and its derivative there."""
    if activation == "silu":
        sigmoid = torch.sigmoid(x)
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
    if activation == "gelu":
        below = 0.5 * torch.erfc(x * -math.sqrt(0.5))  # the normal distribution function
        density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return x * below, below + x * density
    if activation == "gelu_tanh":
        value = torch.nn.functional.gelu(x, approximate="tanh")
        return value, torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")
    positive = x.clamp(min=0.0)
    if activation == "relu2":
        return positive * positive, 2.0 * positive
    return positive, (x > 0.0).float()


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, gated: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.gated = activation, gated
        return gated_product(x, activation) if gated else ops.activate(x, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient(grad, x, ctx.activation, gated=ctx.gated), None, None
