"""The gated feed-forward block: down(act(gate(x)) * up(x)), with act(gate) * up as one product."""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.layers.linear import Activation, GatedLinear, Linear
from tokserve.layers.parameter import Parameter
from tokserve.layers.quant import UNQUANTIZED, QuantMethod


class GatedMLP:
    """`inner` is the width between; `bias` goes for all three projections."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        *,
        activation: Activation,
        bias: bool,
        quant: QuantMethod = UNQUANTIZED,
    ) -> None:
        shards = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = GatedLinear(hidden, shards, dtype, activation, bias=bias, quant=quant)
        self.down = Linear(inner, {"down_proj": hidden}, dtype, bias=bias, quant=quant)

    def parameters(self) -> dict[str, Parameter]:
        """Of `gate_proj`, `up_proj` and `down_proj`."""
        return self.gate_up.parameters() | self.down.parameters()

    def __call__(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:  # [T, hidden] -> [T, hidden]
        """`adapters`: as `Linear` takes them."""
        return self.down(self.gate_up(x, adapters=adapters), adapters=adapters)
