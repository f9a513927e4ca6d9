"""The gated feed-forward block: down(act(gate(x)) * up(x)), with gate and up as one product."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.linear import Linear
from tokserve.layers.parameter import Parameter

Activation = Literal["silu", "gelu_tanh"]


class GatedMLP:
    """`inner` is the width between; `bias` goes for all three projections."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype, *, activation: Activation, bias: bool) -> None:
        self.activation = activation
        self.gate_up = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, dtype, bias=bias)
        self.down = Linear(inner, {"down_proj": hidden}, dtype, bias=bias)

    def parameters(self) -> dict[str, Parameter]:
        """Of `gate_proj`, `up_proj` and `down_proj`."""
        return self.gate_up.parameters() | self.down.parameters()

    def __call__(self, x: Tensor) -> Tensor:  # [T, hidden] -> [T, hidden]
        both = self.gate_up(x)  # [T, 2 * inner]
        return self.down(ops.silu_mul(both) if self.activation == "silu" else ops.gelu_mul(both))
