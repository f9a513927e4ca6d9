"""Activations, gated or not, with a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.layers.quant import gated as gated_product


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """The activation of x [T, I]; `gated`: of the first half of x [T, 2 I], times the second."""
    return _Activate.apply(x, activation, gated)  # type: ignore[no-untyped-call]


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
        return ops.activation_gradients(grad.contiguous(), x, ctx.activation, ctx.gated), None, None
