"""The C++ implementations of norms, residual additions, activations and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import elementwise


@elementwise.rms_norm.implement("cpp", device="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _C.rms_norm(x, None, weight, eps, 1.0, out, None)
    return out


@elementwise.add_rms_norm.implement("cpp", device="cpu")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    _C.rms_norm(x, residual, weight, eps, multiplier, out, total)
    return out, total


@elementwise.layer_norm.implement("cpp", device="cpu")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _C.layer_norm(x, None, weight, bias, eps, 1.0, out, None)
    return out


@elementwise.add_layer_norm.implement("cpp", device="cpu")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    _C.layer_norm(x, residual, weight, bias, eps, multiplier, out, total)
    return out, total


@elementwise.add_residual.implement("cpp", device="cpu")
def add_residual(x: Tensor, residual: Tensor, multiplier: float = 1.0) -> Tensor:
    out = torch.empty_like(x)
    _C.add_residual(x, residual, multiplier, out)
    return out


@elementwise.cap.implement("cpp", device="cpu")
def cap(x: Tensor, multiplier: float, limit: float) -> Tensor:
    out = torch.empty_like(x)
    _C.cap(x, multiplier, limit, out)
    return out


@elementwise.scale_by_position.implement("cpp", device="cpu")
def scale_by_position(x: Tensor, positions: Tensor, growth: float, period: int, first: int = 0) -> Tensor:
    out = torch.empty_like(x)
    _C.scale_by_position(x, positions, growth, period, first, out)
    return out


@elementwise.scale_rows.implement("cpp", device="cpu")
def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _C.scale_rows(x, factors, out)
    return out


@elementwise.norm_values.implement("cpp", device="cpu")
def norm_values(x: Tensor, heads: int, dim: int, eps: float, copied: bool = False) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] + (heads * dim if copied else 0))
    _C.norm_values(x, heads, dim, eps, copied, out)
    return out


@elementwise.gate_inputs.implement("cpp", device="cpu")
def gate_inputs(x: Tensor, inputs: Tensor, layer: int, activation: str) -> Tensor:
    out = torch.empty_like(x)
    _C.gate_inputs(x, inputs, layer, activation, out)
    return out


@elementwise.activate.implement("cpp", device="cpu")
def activate(x: Tensor, activation: str, gated: bool = False) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2 if gated else x.shape[1])
    _C.activate(x, activation, gated, out)
    return out


@elementwise.silu_mul.implement("cpp", device="cpu")
def silu_mul(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _C.silu_mul(x, out)
    return out


@elementwise.gelu_mul.implement("cpp", device="cpu")
def gelu_mul(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _C.gelu_mul(x, out)
    return out


@elementwise.rope.implement("cpp", device="cpu")
def rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """q and k may be slices of one tensor [T, ...]."""
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    _C.rope(q, k, table, positions, interleaved, out_q, out_k)
    return out_q, out_k
