"""The feed-forward block: down(act(gate(x)) * up(x)), with act(gate) * up as one product, or down(act(up(x)))."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tokserve import ops
from tokserve.layers.linear import Activation, GatedLinear, Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import Span
from tokserve.layers.parameter import Parameter, StackedParameter


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """`inner` is the width between the projections; `bias` holds for all of them.

    `gated`: the first projection has a gate's outputs, then as many that it gates.  `up_names`: the checkpoint's names
    of the tensors that form it; `down_name`: that of the second.
    """

    inner: int
    activation: Activation
    bias: bool = False
    gated: bool = True
    up_names: tuple[str, ...] = ("gate_proj", "up_proj")
    down_name: str = "down_proj"

    @property
    def has_experts(self) -> bool:
        return False

    @property
    def routing(self) -> None:
        return None

    def layer(self, hidden: int, options: LayerOptions) -> GatedMLP:
        """The layer without weights."""
        return make_mlp(hidden, self, options)

    def as_stored(self, hidden: int, shapes: Mapping[str, tuple[int, ...]]) -> MLPSpec:
        """Itself: checkpoints store its projections in one way."""
        return self


class GatedMLP:
    """`hidden` is the width of inputs and outputs.  `adds` False: of several ranks, each returns its own part."""

    gate_up: Linear

    def __init__(self, hidden: int, spec: MLPSpec, options: LayerOptions, *, adds: bool = True) -> None:
        self.activation = spec.activation
        width = 2 * spec.inner // len(spec.up_names)
        rows = None
        if len(spec.up_names) == 1:  # the gate's, then as many that it gates
            span = options.group.span(spec.inner, spec.up_names[0])
            rows = {spec.up_names[0]: (span, Span(spec.inner + span.start, span.length))}
        self.gate_up = GatedLinear(
            hidden,
            dict.fromkeys(spec.up_names, width),
            spec.activation,
            options,
            bias=spec.bias,
            split="column",
            rows=rows,
        )
        self.down = Linear(spec.inner, {spec.down_name: hidden}, options, bias=spec.bias, split="row", adds=adds)

    def linears(self) -> dict[str, Linear]:
        """The projections by name."""
        return {"gate_up": self.gate_up, "down": self.down}

    def parameters(self) -> dict[str, Parameter]:
        """The parameters of the projections, under the checkpoint's names."""
        return self.gate_up.parameters() | self.down.parameters()

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        """None: a checkpoint has each projection by itself."""
        return {}

    def __call__(
        self, x: Tensor, adapters: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        """`adapters`: as `Linear` takes them.  `routed` stays as it is: there are no experts."""
        return self.down(self.gate_up(x, adapters=adapters), adapters=adapters)


class PlainMLP(GatedMLP):
    """An MLP without a gate."""

    def __init__(self, hidden: int, spec: MLPSpec, options: LayerOptions) -> None:
        self.activation = spec.activation
        (name,) = spec.up_names
        self.gate_up = Linear(hidden, {name: spec.inner}, options, bias=spec.bias, split="column")
        self.down = Linear(spec.inner, {spec.down_name: hidden}, options, bias=spec.bias, split="row")

    def linears(self) -> dict[str, Linear]:
        return {"up": self.gate_up, "down": self.down}

    def __call__(
        self, x: Tensor, adapters: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        return self.down(ops.activate(self.gate_up(x, adapters=adapters), self.activation), adapters=adapters)


def make_mlp(hidden: int, spec: MLPSpec, options: LayerOptions) -> GatedMLP:
    """The feed-forward block that the spec describes."""
    return (GatedMLP if spec.gated else PlainMLP)(hidden, spec, options)
