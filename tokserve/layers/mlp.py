"""The gated feed-forward block: down(act(gate(x)) * up(x)), with act(gate) * up as one product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokserve.layers.linear import Activation, GatedLinear, Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """`inner` is the width between the projections; `bias` holds for all three."""

    inner: int
    activation: Activation
    bias: bool = False


class GatedMLP:
    """`hidden` is the width of inputs and outputs.  `module`: the checkpoint's name for it."""

    module = "mlp"

    def __init__(self, hidden: int, spec: MLPSpec, options: LayerOptions) -> None:
        shards = {"gate_proj": spec.inner, "up_proj": spec.inner}
        self.gate_up = GatedLinear(hidden, shards, spec.activation, options, bias=spec.bias, split="column")
        self.down = Linear(spec.inner, {"down_proj": hidden}, options, bias=spec.bias, split="row")

    def linears(self) -> dict[str, Linear]:
        """The projections by name."""
        return {"gate_up": self.gate_up, "down": self.down}

    def parameters(self) -> dict[str, Parameter]:
        """Of `gate_proj`, `up_proj` and `down_proj`."""
        return self.gate_up.parameters() | self.down.parameters()

    def __call__(
        self, x: Tensor, adapters: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        """`adapters`: as `Linear` takes them.  `routed` stays as it is: there are no experts."""
        return self.down(self.gate_up(x, adapters=adapters), adapters=adapters)
