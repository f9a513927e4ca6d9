"""The state-space layer (Mamba-2) in attention's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokserve import ops
from tokserve.families.recurrent.layers import Convolution, Recurrent, RecurrentSpec
from tokserve.families.recurrent.replay import rounded
from tokserve.families.state_space import replay
from tokserve.layers.batch import StateRows
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import ALONE
from tokserve.layers.parameter import Parameter
from tokserve.layers.rope import NO_ROPE, RopeSpec
from tokserve.protocol.kv_spec import StateSpec, dtype_name

# With this epsilon a norm divides all rows by its root, so that it is the product with a vector.
OUTWEIGHS = 2.0**80


@dataclass(frozen=True, slots=True)
class StateSpaceSpec(RecurrentSpec):
    """`heads` of `dim` elements in `groups` that share their B and C of `size` elements.

    `taps`: of the convolution; `conv_bias`, `bias`: whether it and the projections have biases.  `norm_size`: outputs
    that are normalized together; 0: there is no norm.  `limits`: of a step's size.  `multipliers`: of the parts that
    are projected, gates, inputs, B, C and steps; empty: there are none.
    """

    heads: int
    dim: int
    groups: int
    size: int
    taps: int
    eps: float
    norm_size: int
    conv_bias: bool = True
    bias: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    multipliers: tuple[float, ...] = ()
    rope: RopeSpec = NO_ROPE

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.size

    def layer(self, hidden: int, options: LayerOptions) -> StateSpace:
        """The layer without weights; every rank has it whole."""
        return StateSpace(hidden, self, replace(options, group=ALONE))


class StateSpace(Recurrent):
    """`hidden` is the width of inputs and outputs."""

    a_log: Tensor  # [heads] float32
    dt_bias: Tensor  # [heads] float32
    skip: Tensor  # [heads] float32
    norm_weight: Tensor | None = None  # [heads * dim] float32
    multipliers: Tensor | None = None  # [outputs of the first projection] float32

    def __init__(self, hidden: int, spec: StateSpaceSpec, options: LayerOptions) -> None:
        self.spec, self.dtype = spec, options.dtype
        outputs = spec.inner + spec.channels + spec.heads
        if spec.multipliers:
            sizes = torch.tensor([spec.inner, spec.inner, *[spec.groups * spec.size] * 2, spec.heads])
            vector = torch.tensor(spec.multipliers).repeat_interleave(sizes) * OUTWEIGHS**0.5
            self.multipliers = vector.to(ops.torch_device)
        self.project = Linear(hidden, {"in_proj": outputs}, options, bias=spec.bias)
        self.conv = Convolution(spec.channels, spec.taps, options.dtype, bias=spec.conv_bias)
        self.out = Linear(spec.inner, {"out_proj": hidden}, options, bias=spec.bias)

    def vectors(self) -> dict[str, Parameter]:
        parameters = {f"conv1d.{name}": parameter for name, parameter in self.conv.parameters().items()}
        for name, attribute in (("A_log", "a_log"), ("dt_bias", "dt_bias"), ("D", "skip")):
            parameters[name] = self._vector(attribute, self.spec.heads)
        if self.spec.norm_size:
            parameters["norm.weight"] = self._vector("norm_weight", self.spec.inner)
        return parameters

    def kv_spec(self) -> StateSpec:
        spec = self.spec
        memory = (spec.heads, spec.size, spec.dim)
        return StateSpec(spec.taps, spec.channels + spec.heads, dtype_name(self.dtype), memory=memory)

    def mix(
        self,
        projected: Sequence[Tensor],
        kept: Sequence[Tensor],
        query_start: Tensor,
        seq_lens: Tensor,
        states: StateRows,
    ) -> Tensor:  # [T, heads * dim]
        spec, (x,), (ring, memory) = self.spec, projected, kept
        low, high = spec.limits
        if self.multipliers is not None:
            x = ops.rms_norm(x, self.multipliers, OUTWEIGHS)
        return ops.scan_states(
            x,
            self.conv.weight,
            self.conv.bias,
            self.a_log,
            self.dt_bias,
            self.skip,
            self.norm_weight,
            spec.norm_size or spec.inner,
            spec.eps,
            low,
            high,
            memory,
            ring,
            query_start,
            seq_lens,
            states.rows,
            states.start,
            states.end,
            states.saves,
        )

    def replay(
        self, projected: Sequence[Tensor], earlier: int, memory: Tensor | None, vectors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        spec, (x,) = self.spec, projected
        if self.multipliers is not None:
            x = rounded(x * self.multipliers / OUTWEIGHS**0.5, self.dtype)
        return replay.scan_states(
            x,
            earlier,
            memory,
            vectors,
            groups=spec.groups,
            size=spec.size,
            norm_size=spec.norm_size,
            eps=spec.eps,
            limits=spec.limits,
            dtype=self.dtype,
        )
