"""Norms and residual additions with a gradient; see `functions` for masters and layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokserve import ops
from tokserve.layers.norm import LayerNorm, NoNorm, RMSNorm


def norm(x: Tensor, layer: NoNorm, masters: Sequence[Tensor]) -> Tensor:  # [T, H] -> [T, H]
    """The norm of x.  `masters`: weight and, if there is one, bias."""
    return _Norm.apply(x, layer, *masters) if isinstance(layer, RMSNorm) else x  # type: ignore[no-untyped-call]


def add_norm(
    x: Tensor, residual: Tensor, layer: NoNorm, masters: Sequence[Tensor], multiplier: float
) -> tuple[Tensor, Tensor]:
    """(norm of the sum x * multiplier + residual, the sum), each [T, H]."""
    if not isinstance(layer, RMSNorm):
        total = add_residual(x, residual, multiplier)
        return total, total
    return _AddNorm.apply(x, residual, layer, multiplier, *masters)  # type: ignore[no-untyped-call]


def add_residual(x: Tensor, residual: Tensor, multiplier: float) -> Tensor:  # [T, H]
    return _AddResidual.apply(x, residual, multiplier)  # type: ignore[no-untyped-call]


def scaled(x: Tensor, factor: Tensor) -> Tensor:  # [T, H] -> [T, H]
    """x times a constant [1] float32."""
    return _Scaled.apply(x, factor)  # type: ignore[no-untyped-call]


def gradients(layer: RMSNorm, grad: Tensor, x: Tensor, carried: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gradients of what the layer norms, x [T, H], in its dtype, of its weight and of its bias, if there is one.
    `carried` [T, H] is added to the gradient of x."""
    if not isinstance(layer, LayerNorm):
        return ops.norm_gradients(grad.contiguous(), x, layer.weight, layer.eps, carried)
    grads = ops.layer_norm_gradients(grad.contiguous(), x, layer.weight, layer.eps, carried)
    return grads if layer.bias is not None else grads[:2]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RMSNorm, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *masters)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *_ = ctx.saved_tensors
        grad_x, *grads = gradients(ctx.layer, grad, x)
        return grad_x, None, *grads


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, layer: RMSNorm, multiplier: float, *masters: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed, total = layer.add(x, residual, multiplier)
        ctx.save_for_backward(total, *masters)
        ctx.layer, ctx.multiplier = layer, multiplier
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> Any:
        total, *_ = ctx.saved_tensors
        grad_residual, *grads = gradients(ctx.layer, grad, total, grad_total.contiguous())
        grad_x = grad_residual if ctx.multiplier == 1.0 else grad_residual * ctx.multiplier
        return grad_x, grad_residual, None, None, *grads


class _AddResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        ctx.multiplier = multiplier
        return ops.add_residual(x, residual, multiplier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad if ctx.multiplier == 1.0 else grad * ctx.multiplier), grad, None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return ops.scale_rows(x, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return ops.scale_rows(grad.contiguous(), factor), None
