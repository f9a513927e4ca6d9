"""Layers in attention's place whose memory of a sequence has a fixed size.

What a layer keeps is in two kinds of tensors with a row per state: `memory`, if the layer has one, and the ring of its
convolution's last inputs.  The batch says which row belongs to which request, and to which position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.families.recurrent import replay
from tokserve.layers.batch import ForwardBatch, LogitsRows, StateRows
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import ALONE
from tokserve.layers.parameter import Parameter, owned_copy
from tokserve.layers.places import TransposedPlace, VectorPlace
from tokserve.layers.rope import NO_ROPE, RopeSpec
from tokserve.ops.recurrent import Sizes
from tokserve.protocol.kv_spec import StateSpec, dtype_name


class RecurrentSpec:
    """The spec of a layer that is a `Recurrent`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(RecurrentSpec):
    """The gated delta rule: `heads` value heads of `dim` in groups that share the `key_heads` keys of `key_dim`.

    `taps`: of the convolution.  `grouped`: a projection has the parts of the first key head, then those of the next.
    `names`: and sizes of the tensors that form the first projection; `rate_names`: of those of step sizes and decays.
    """

    heads: int
    dim: int
    key_heads: int
    key_dim: int
    taps: int
    eps: float
    grouped: bool
    names: tuple[tuple[str, int], ...]
    rate_names: tuple[tuple[str, int], ...]
    rope: RopeSpec = NO_ROPE

    def layer(self, hidden: int, options: LayerOptions) -> GatedDelta:
        """The layer without weights; every rank has it whole."""
        return GatedDelta(hidden, self, replace(options, group=ALONE))


@dataclass(frozen=True, slots=True)
class ShortConvSpec(RecurrentSpec):
    """A gated convolution of as many channels as the model is wide; `bias`: of it and of both projections."""

    taps: int
    bias: bool
    rope: RopeSpec = NO_ROPE

    def layer(self, hidden: int, options: LayerOptions) -> ShortConv:
        """The layer without weights; every rank has it whole."""
        return ShortConv(hidden, self, replace(options, group=ALONE))


class Convolution:
    """The weight of a causal convolution of each channel by itself, tap by tap."""

    weight: Tensor  # [taps, channels] float32

    def __init__(self, channels: int, taps: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        self.channels, self.taps, self.dtype = channels, taps, dtype
        self.bias = torch.zeros(channels, device=ops.torch_device) if bias else None  # [channels] float32

    def parameters(self) -> dict[str, Parameter]:
        """`weight` [channels,1,taps] and, if there is one, `bias`."""
        shape = (self.channels, 1, self.taps)
        weight = Parameter(shape, self.load, torch.float32, places=lambda: [TransposedPlace(self.weight)])
        if self.bias is None:
            return {"weight": weight}
        bias = Parameter((self.channels,), self.load_bias, torch.float32, places=self._bias_places)
        return {"weight": weight, "bias": bias}

    def _bias_places(self) -> list[VectorPlace]:
        assert self.bias is not None
        return [VectorPlace(self.bias)]

    def load(self, tensor: Tensor) -> None:
        """Take the weight."""
        if tuple(tensor.shape) != (self.channels, 1, self.taps):
            raise ValueError(f"expected [{self.channels}, 1, {self.taps}], found {list(tensor.shape)}")
        self.weight = owned_copy(tensor[:, 0].t(), (self.taps, self.channels), torch.float32)

    def load_bias(self, tensor: Tensor) -> None:
        """Take the bias."""
        self.bias = owned_copy(tensor, (self.channels,), torch.float32)


class NoCache:
    """What a decoder asks of attention, for layers without keys, values and scales of a cache."""

    k_scale = v_scale = 1.0

    def probe(self) -> None:
        """There is no attention to check."""

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """There is no cache to scale."""

    def row_elements(self) -> int:
        """No elements beside those of the projections."""
        return 0

    def borrow(self, other: object) -> None:
        """A draft model has the states of its layers nowhere."""
        raise StartError("speculative_config: a draft model is not supported with recurrent states")


class Recurrent(NoCache, ABC):
    """What these layers have in common: projections, a recurrence that mixes the tokens, an output projection."""

    dtype: torch.dtype
    project: Linear
    out: Linear

    def projections(self) -> list[Linear]:
        """The layers whose outputs `mix` takes, in its order."""
        return [self.project]

    def linears(self) -> dict[str, Linear]:
        """The projections by name."""
        return {"project": self.project, "out": self.out}

    @abstractmethod
    def vectors(self) -> dict[str, Parameter]:
        """The parameters of the recurrence, all float32, under the names of Hugging Face checkpoints."""

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of Hugging Face checkpoints."""
        parameters: dict[str, Parameter] = {}
        for linear in self.linears().values():
            parameters |= linear.parameters()
        return parameters | self.vectors()

    @abstractmethod
    def kv_spec(self) -> StateSpec:
        """What a state has of this layer."""

    @abstractmethod
    def mix(
        self,
        projected: Sequence[Tensor],
        kept: Sequence[Tensor],
        query_start: Tensor,
        seq_lens: Tensor,
        states: StateRows,
    ) -> Tensor:
        """The inputs [T, W] of the output projection from outputs of `projections` [T, ...].  `kept`: the ring and, if
        the layer has one, the memory, which go on in place; the rest is of a `ForwardBatch`."""

    @abstractmethod
    def replay(
        self, projected: Sequence[Tensor], earlier: int, memory: Tensor | None, vectors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """What `mix` computes of consecutive tokens of a sequence, for the gradients: in float32 and by torch's
        differentiable functions, with other bits.

        `projected` [n, ...] float32 begin with the `earlier` tokens before them, those that the convolution reads.
        `memory` is that before the first token, None if there is none or the sequence begins here.  `vectors`: the
        parameters of the recurrence.  Returns the values [n - earlier, W] and the memory after the last token."""

    def __call__(
        self, x: Tensor, batch: ForwardBatch, layer: int, table: Tensor, logits_rows: LogitsRows | None = None
    ) -> Tensor:  # [T, hidden] -> same, or [n, hidden] of the n tokens of `logits_rows`
        assert batch.states is not None
        projected = [linear(x, adapters=batch.adapters) for linear in self.projections()]
        mixed = self.mix(projected, batch.kv[layer], batch.query_start, batch.seq_lens, batch.states)
        if logits_rows is None:
            return self.out(mixed, adapters=batch.adapters)
        return self.out(mixed.index_select(0, logits_rows.tokens), adapters=logits_rows.adapters)

    def _vector(self, attribute: str, size: int) -> Parameter:
        def load(tensor: Tensor) -> None:
            setattr(self, attribute, owned_copy(tensor, (size,), torch.float32))

        return Parameter((size,), load, torch.float32, places=lambda: [VectorPlace(getattr(self, attribute))])


class GatedDelta(Recurrent):
    """`hidden` is the width of inputs and outputs."""

    a_log: Tensor  # [heads] float32
    dt_bias: Tensor  # [heads] float32
    norm_weight: Tensor  # [dim] float32

    def __init__(self, hidden: int, spec: GatedDeltaSpec, options: LayerOptions) -> None:
        self.spec, self.dtype = spec, options.dtype
        self.project = Linear(hidden, dict(spec.names), options)
        self.rates = Linear(hidden, dict(spec.rate_names), LayerOptions(options.dtype))
        self.channels = 2 * spec.key_heads * spec.key_dim + spec.heads * spec.dim
        self.conv = Convolution(self.channels, spec.taps, options.dtype)
        self.out = Linear(spec.heads * spec.dim, {"out_proj": hidden}, options)

    def projections(self) -> list[Linear]:
        return [self.project, self.rates]

    def linears(self) -> dict[str, Linear]:
        return {"project": self.project, "rates": self.rates, "out": self.out}

    def vectors(self) -> dict[str, Parameter]:
        parameters = {f"conv1d.{name}": parameter for name, parameter in self.conv.parameters().items()}
        for name, attribute, size in (
            ("A_log", "a_log", self.spec.heads),
            ("dt_bias", "dt_bias", self.spec.heads),
            ("norm.weight", "norm_weight", self.spec.dim),
        ):
            parameters[name] = self._vector(attribute, size)
        return parameters

    def kv_spec(self) -> StateSpec:
        spec = self.spec
        entry = self.channels + 2 * spec.heads
        dtype = dtype_name(self.dtype)
        return StateSpec(spec.taps, entry, dtype, memory=(spec.heads, spec.key_dim, spec.dim))

    def mix(
        self,
        projected: Sequence[Tensor],
        kept: Sequence[Tensor],
        query_start: Tensor,
        seq_lens: Tensor,
        states: StateRows,
    ) -> Tensor:  # [T, heads * dim]
        (x, rates), (ring, memory) = projected, kept
        return ops.gated_delta(
            x,
            rates,
            self.conv.weight,
            self.a_log,
            self.dt_bias,
            self.norm_weight,
            self.spec.eps,
            self.spec.grouped,
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
        spec = self.spec
        sizes = Sizes(spec.heads, spec.key_dim, spec.dim, self.channels)
        return replay.gated_delta(sizes, spec.eps, spec.grouped, projected, earlier, memory, vectors)


class ShortConv(Recurrent):
    """`hidden` is the width of inputs, outputs and the convolution."""

    def __init__(self, hidden: int, spec: ShortConvSpec, options: LayerOptions) -> None:
        self.hidden, self.taps, self.dtype = hidden, spec.taps, options.dtype
        self.project = Linear(hidden, {"in_proj": 3 * hidden}, options, bias=spec.bias)
        self.conv = Convolution(hidden, spec.taps, options.dtype, bias=spec.bias)
        self.out = Linear(hidden, {"out_proj": hidden}, options, bias=spec.bias)

    def vectors(self) -> dict[str, Parameter]:
        return {f"conv.{name}": parameter for name, parameter in self.conv.parameters().items()}

    def kv_spec(self) -> StateSpec:
        return StateSpec(self.taps, self.hidden, dtype_name(self.dtype))

    def mix(
        self,
        projected: Sequence[Tensor],
        kept: Sequence[Tensor],
        query_start: Tensor,
        seq_lens: Tensor,
        states: StateRows,
    ) -> Tensor:  # [T, hidden]
        (x,), (ring,) = projected, kept
        return ops.short_conv(
            x,
            self.conv.weight,
            self.conv.bias,
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
    ) -> tuple[Tensor, None]:
        (x,) = projected
        return replay.short_conv(self.dtype, x, earlier, vectors), None
