"""The C++ implementations of the layers with a recurrent state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokserve import _C
from tokserve.ops import recurrent, state_space


@recurrent.gated_delta.implement("cpp", device="cpu")
def gated_delta(
    x: Tensor,
    rates: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    grouped: bool,
    state: Tensor,
    *rest: Any,
) -> Tensor:
    out = x.new_empty(x.shape[0], state.shape[1] * state.shape[3])
    _C.gated_delta(x, rates, conv_weight, a_log, dt_bias, norm_weight, eps, grouped, state, *rest, out)
    return out


@recurrent.short_conv.implement("cpp", device="cpu")
def short_conv(x: Tensor, conv_weight: Tensor, *rest: Any) -> Tensor:
    out = x.new_empty(x.shape[0], conv_weight.shape[1])
    _C.short_conv(x, conv_weight, *rest, out)
    return out


@state_space.scan_states.implement("cpp", device="cpu")
def scan_states(x: Tensor, *rest: Any) -> Tensor:
    state = rest[10]
    out = x.new_empty(x.shape[0], state.shape[1] * state.shape[3])
    _C.scan_states(x, *rest, out)
    return out


@recurrent.gate_heads.implement("cpp", device="cpu")
def gate_heads(mixed: Tensor, x: Tensor) -> Tensor:
    out = mixed.new_empty(mixed.shape[0], mixed.shape[1] * mixed.shape[2])
    _C.gate_heads(mixed, x, out)
    return out
