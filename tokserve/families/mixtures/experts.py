"""A mixture of experts: a router chooses some of many gated feed-forward blocks for each token.

The weights of experts are packed one by one as they come, whether a checkpoint has a tensor for each expert or one for
all.  What is computed for a token depends on that token alone (docs/mixtures.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.families.quantization.quantized import QuantizedWeight
from tokserve.layers.linear import Linear
from tokserve.layers.mlp import GatedMLP, MLPSpec
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import Span
from tokserve.layers.parameter import Parameter, StackedParameter, StoredWeight, as_dense, owned_copy, part_of, under
from tokserve.layers.protocols import Routing
from tokserve.layers.quant import Packed

ExpertActivation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How `chosen` experts of a token are found among all.  Fields as the arguments of `ops.route`.

    `bias`: of the logits.  `correction_bias`: the checkpoint's name of a bias that is added to the scores, for the
    choice alone; None: there is none; `correction_row`: it is stored as [1, experts].
    """

    chosen: int
    sigmoid: bool = False
    normalize: bool = True
    added: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    two_of_group: bool = False
    bias: bool = False
    correction_bias: str | None = None
    correction_row: bool = False


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """`experts` blocks of width `inner`, and at most one `shared` block that every token passes.

    `shared_name`: of its module; `shared_gate`: its output is multiplied by the sigmoid of a product with the input.
    `stacked`: checkpoints have one tensor for all experts only; `interleaved`: it is stored transposed, gate and up
    outputs alternating; `transposed`: it is stored so, one above the other.  `router_name`, `experts_name`, `names`:
    the checkpoint's names of the router, of the module of all experts, and of an expert's gate, up and down
    projections.  `scales_input`: the weight of the one chosen expert multiplies its input, not its output.
    """

    experts: int
    inner: int
    router: RouterSpec
    activation: ExpertActivation = "silu"
    bias: bool = False
    shared: MLPSpec | None = None
    shared_name: str = "shared_expert"
    shared_gate: bool = False
    stacked: bool = False
    interleaved: bool = False
    transposed: bool = False
    router_name: str = "gate"
    experts_name: str = "experts"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    scales_input: bool = False

    @property
    def has_experts(self) -> bool:
        return True

    @property
    def routing(self) -> Routing:
        return Routing(self.experts, self.router.chosen)

    def layer(self, hidden: int, options: LayerOptions) -> Mixture:
        """The layer without weights."""
        return Mixture(hidden, self, options)

    def as_stored(self, hidden: int, shapes: Mapping[str, tuple[int, ...]]) -> MixtureSpec:
        """Released checkpoints store tensors of all experts transposed; transformers saves a model that it has not read
        from one of these as it computes with it."""
        stored = tuple(shapes.get(f"{self.experts_name}.{name}", ()) for name in ("gate_up_proj", "down_proj"))
        straight = stored == ((self.experts, 2 * self.inner, hidden), (self.experts, hidden, self.inner))
        return replace(self, transposed=False) if straight else self


class StoredExperts(StoredWeight, Protocol):
    """The weights of all experts, stored as one that is not a tensor of floats.  `interleaved`: rows of gate and up
    alternate in what `expert` returns, else the gate is above."""

    @property
    def interleaved(self) -> bool: ...

    def expert(self, index: int) -> Tensor | StoredWeight:
        """An expert's weight [N,K]."""


class Experts:
    """The weights of all experts, packed for `ops.experts`.  A rank of several has a part of each expert's width."""

    def __init__(self, hidden: int, spec: MixtureSpec, options: LayerOptions) -> None:
        self.spec, self.hidden, self.dtype, self.quant = spec, hidden, options.dtype, options.quant
        if not self.quant.covers_experts:
            raise StartError(f"quantization {self.quant.name} does not cover the experts of a mixture")
        self._group = group = options.group
        self._mine = group.span(spec.inner, "the width of an expert")
        self.inner = self._mine.length
        self.gate_up: list[Packed | None] = [None] * spec.experts
        self.down: list[Packed | None] = [None] * spec.experts
        device = ops.torch_device
        self.gate_up_bias = self.down_bias = None
        if spec.bias:
            self.gate_up_bias = torch.zeros(spec.experts, 2 * self.inner, dtype=self.dtype, device=device)
            self.down_bias = torch.zeros(spec.experts, hidden, dtype=self.dtype, device=device)
        self._halves: dict[int, Packed | Tensor] = {}  # by expert, gate and up while one of them is missing
        self._stored: dict[tuple[int, str], StoredWeight] = {}  # gate or up as stored, while the other is missing

    def parameters(self) -> dict[str, Parameter]:
        """`<expert>.gate_proj.weight` and so on; `gate_up_proj` and `down_proj` where checkpoints have only these."""
        if self.spec.stacked:
            return {name: stacked.parameter for name, stacked in self.stacked_parameters().items()} | self._biases()
        parameters, kept = {}, self.quant.kept_dtype(self.dtype)
        for expert in range(self.spec.experts):
            for shard, name in zip(("gate", "up", "down"), self.spec.names, strict=True):
                load, load_stored = partial(self.load, expert, shard), partial(self.load_stored, expert, shard)
                parameters[f"{expert}.{name}.weight"] = Parameter(
                    self._shape(shard), load, kept, load_stored, rounded=self.dtype, share=1 / self._group.size
                )
        return parameters

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        """One tensor for all experts: gate above up [E,2I,H], and down [E,H,I]; transposed if `interleaved` or
        `transposed`."""
        kept = self.quant.kept_dtype(self.dtype)

        def stacked(
            shards: tuple[str, ...],
            rows: int,
            columns: int,
            load: Callable[[Tensor], None],
            load_stored: Callable[..., None],
        ) -> StackedParameter:
            shape = (columns, rows) if self.spec.interleaved or self.spec.transposed else (rows, columns)
            names = [] if self.spec.stacked else [f"{e}.{s}.weight" for e in range(self.spec.experts) for s in shards]
            if self.spec.transposed:
                parameter = Parameter(
                    (self.spec.experts, *shape),
                    lambda tensor: load(tensor.transpose(1, 2)),
                    kept,
                    rounded=self.dtype,
                    share=1 / self._group.size,
                )
            else:
                parameter = Parameter(
                    (self.spec.experts, *shape), load, kept, load_stored, rounded=self.dtype, share=1 / self._group.size
                )
            return StackedParameter(parameter, tuple(names))

        inner, hidden, names = self.spec.inner, self.hidden, self.spec.names
        return {
            "gate_up_proj": stacked(names[:2], 2 * inner, hidden, self.load_gate_up, self.load_stored_gate_up),
            "down_proj": stacked(names[2:], hidden, inner, self.load_down, self.load_stored_down),
        }

    def _biases(self) -> dict[str, Parameter]:
        if self.gate_up_bias is None or self.down_bias is None:
            return {}
        return {
            "gate_up_proj_bias": Parameter(
                (self.spec.experts, 2 * self.spec.inner), self.load_gate_up_bias, self.dtype, share=1 / self._group.size
            ),
            "down_proj_bias": Parameter(tuple(self.down_bias.shape), self.load_down_bias, self.dtype),
        }

    def _shape(self, shard: str) -> tuple[int, int]:
        return (self.hidden, self.spec.inner) if shard == "down" else (self.spec.inner, self.hidden)

    def _part(self, shard: str, weight: Tensor | StoredWeight) -> Tensor | StoredWeight:
        """What this rank has of one expert's projection; `shard` "both": a gate's rows above those of up."""
        if self._group.size == 1:
            return weight
        first, length = self._mine
        spans = [self._mine, Span(self.spec.inner + first, length)] if shard == "both" else [self._mine]
        return part_of(weight, 1 if shard == "down" else 0, spans)

    def load(self, expert: int, shard: str, tensor: Tensor) -> None:
        """Take one projection of one expert; gate and up are packed together."""
        if tuple(tensor.shape) != self._shape(shard):
            raise ValueError(f"{shard}: expected {list(self._shape(shard))}, found {list(tensor.shape)}")
        self._load(expert, shard, as_dense(self._part(shard, tensor)))

    def _load(self, expert: int, shard: str, tensor: Tensor) -> None:
        """Take this rank's part of it."""
        if shard == "down":
            self.down[expert] = self.quant.pack(_rows(tensor, self.dtype))
            return
        if (other := self._stored.pop((expert, _other(shard)), None)) is not None:
            self._load(expert, _other(shard), other.dense())
        rows, first = _rows(tensor, self.dtype), self.inner * (shard == "up")
        if not self.quant.packs_rows:
            self._load_both(expert, shard, rows)
            return
        complete = expert in self._halves
        weight = self.quant.pack_gated(rows, 2 * self.inner, first, self._halves.pop(expert, None))
        if complete:
            self.gate_up[expert] = weight
        else:
            self._halves[expert] = weight

    def _load_both(self, expert: int, shard: str, rows: Tensor) -> None:
        """Take a gate or an up projection for a method that packs whole weights: with the second of them."""
        other = self._halves.pop(expert, None)
        if isinstance(other, Tensor):
            self.gate_up[expert] = self.quant.pack_gated(torch.cat((rows, other) if shard == "gate" else (other, rows)))
        else:
            self._halves[expert] = rows.clone()

    def load_stored(self, expert: int, shard: str, weight: StoredWeight) -> None:
        """Take one projection of one expert in the form in which it is stored, where the method accepts that.  A gate
        and an up projection that cannot be packed together become floats."""
        if tuple(weight.shape) != self._shape(shard):
            raise ValueError(f"{shard}: expected {list(self._shape(shard))}, found {list(weight.shape)}")
        part = self._part(shard, weight)
        if isinstance(part, Tensor) or not self.quant.accepts(part):
            self._load(expert, shard, as_dense(part))
            return
        weight = part
        if shard == "down":
            self.down[expert] = self.quant.pack(weight)
        elif expert in self._halves:
            self._load(expert, shard, weight.dense())
        elif (other := self._stored.pop((expert, _other(shard)), None)) is None:
            self._stored[expert, shard] = weight.clone()
        else:
            gate, up = (weight, other) if shard == "gate" else (other, weight)
            self._pack_gated(expert, gate.joined([up]), lambda: torch.cat((gate.dense(), up.dense())))

    def _pack_gated(self, expert: int, whole: StoredWeight | None, dense: Callable[[], Tensor]) -> None:
        """Pack gate above up; as what they mean if they are not one weight, or not one that the activation takes."""
        apart = isinstance(whole, QuantizedWeight) and len(whole.parts) > 1
        if whole is None or (apart and self.spec.activation == "clamped_swiglu"):
            self.gate_up[expert] = self.quant.pack_gated(dense().to(self.dtype))
        else:
            self.gate_up[expert] = self.quant.pack_gated(whole)

    def load_stored_gate_up(self, weights: StoredExperts) -> None:
        """Take the gate and up projections of all experts as they are stored, expert by expert."""
        for expert in range(self.spec.experts):
            weight = weights.expert(expert)
            if isinstance(weight, QuantizedWeight) and self.quant.accepts(weight):
                halves = (weight.every_other(0), weight.every_other(1)) if weights.interleaved else (weight,)
                whole = halves[0].joined(halves[1:])
                part = None if whole is None else self._part("both", whole)
                if isinstance(part, QuantizedWeight) and self.quant.accepts(part):
                    self._pack_gated(expert, part, part.dense)
                    continue
            rows = as_dense(weight)
            rows = self._gate_up_rows(_deinterleaved(rows) if weights.interleaved else rows)
            self.gate_up[expert] = self.quant.pack_gated(rows.to(self.dtype))

    def load_stored_down(self, weights: StoredExperts) -> None:
        """Take the down projections of all experts as they are stored, expert by expert."""
        for expert in range(self.spec.experts):
            weight = self._part("down", weights.expert(expert))
            if isinstance(weight, Tensor) or not self.quant.accepts(weight):
                weight = as_dense(weight).to(self.dtype)
            self.down[expert] = self.quant.pack(weight)

    def _gate_up_rows(self, rows: Tensor) -> Tensor:
        """This rank's rows of a gate above up [2I, ...]."""
        return as_dense(self._part("both", rows))

    def load_gate_up(self, tensor: Tensor) -> None:
        for expert, rows in enumerate(_transposed(tensor) if self.spec.interleaved else tensor):
            halves = (rows[::2], rows[1::2]) if self.spec.interleaved else rows.chunk(2)
            for shard, half in zip(("gate", "up"), halves, strict=True):
                self._load(expert, shard, as_dense(self._part(shard, half)))

    def load_down(self, tensor: Tensor) -> None:
        """Take the down projections of all experts."""
        for expert, weight in enumerate(_transposed(tensor) if self.spec.interleaved else tensor):
            self.down[expert] = self.quant.pack(_rows(as_dense(self._part("down", weight)), self.dtype))

    def load_gate_up_bias(self, tensor: Tensor) -> None:
        assert self.gate_up_bias is not None
        rows = _deinterleaved(tensor.t()) if self.spec.interleaved else tensor.t()
        self.gate_up_bias.copy_(self._gate_up_rows(rows).t())

    def load_down_bias(self, tensor: Tensor) -> None:
        """Take the biases [E,H] of the down projections."""
        assert self.down_bias is not None
        if self._group.rank == 0:
            self.down_bias.copy_(tensor)

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        """`ids`, `weights` [T,k]: of the router.  `shared`, `shared_gate`: what is added, as in `ops.experts`; of
        several ranks, this one's part."""
        out = self.quant.experts(
            x,
            ids,
            weights,
            self.gate_up,
            self.gate_up_bias,
            self.down,
            self.down_bias,
            self.spec.activation,
            shared,
            shared_gate,
        )
        return out if self._group.size == 1 else self._group.add(out.float(), out.dtype)


class Router:
    """Scores of all experts, and the choice among them.  Logits are float32 sums of the model's dtype, unquantized."""

    correction_bias: Tensor  # [E] float32

    def __init__(self, hidden: int, mixture: MixtureSpec, options: LayerOptions) -> None:
        self.spec, self.experts = mixture.router, mixture.experts
        shards = {mixture.router_name: mixture.experts}
        self.linear = Linear(hidden, shards, LayerOptions(options.dtype), bias=self.spec.bias)

    def parameters(self) -> dict[str, Parameter]:
        """Weight, bias and correction bias, as far as there are any."""
        parameters = self.linear.parameters()
        if self.spec.correction_bias is not None:
            shape = (1, self.experts) if self.spec.correction_row else (self.experts,)
            parameters[self.spec.correction_bias] = Parameter(shape, self.load_correction, torch.float32)
        return parameters

    def load_correction(self, tensor: Tensor) -> None:
        self.correction_bias = owned_copy(tensor.view(-1), (self.experts,), torch.float32)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids int32 and weights float32 [T,k] for x [T,hidden]."""
        return self.choose(self.linear(x, torch.float32))

    def choose(self, logits: Tensor, *, normalize: bool | None = None) -> tuple[Tensor, Tensor]:
        """Ids int32 and weights float32 [T,k] for logits float32 [T,E].  `normalize`: in place of the spec's."""
        spec = self.spec
        bias = None if spec.correction_bias is None else self.correction_bias
        return ops.route(
            logits,
            bias,
            spec.chosen,
            spec.sigmoid,
            spec.groups,
            spec.kept_groups,
            spec.two_of_group,
            spec.normalize if normalize is None else normalize,
            spec.added,
            spec.scale,
        )


class Mixture:
    """The feed-forward part of a block: router, experts and, if there is one, the shared block."""

    def __init__(self, hidden: int, spec: MixtureSpec, options: LayerOptions) -> None:
        self.spec = spec
        self.router = Router(hidden, spec, options)
        self.experts = Experts(hidden, spec, options)
        self.shared = None if spec.shared is None else GatedMLP(hidden, spec.shared, options, adds=False)
        plain = LayerOptions(options.dtype)
        self.shared_gate = Linear(hidden, {f"{spec.shared_name}_gate": 1}, plain) if spec.shared_gate else None

    def linears(self) -> dict[str, Linear]:
        """Projections that adapters can change: those of the shared block, not the router's and the experts'."""
        return {} if self.shared is None else under(self.spec.shared_name, self.shared.linears())

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of Hugging Face checkpoints."""
        parameters = self.router.parameters() | under(self.spec.experts_name, self.experts.parameters())
        if self.shared is not None:
            parameters |= under(self.spec.shared_name, self.shared.parameters())
        if self.shared_gate is not None:
            parameters |= self.shared_gate.parameters()
        return parameters

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        """What a checkpoint may have in place of a tensor for each expert."""
        if self.spec.stacked:
            return {}
        prefix = self.spec.experts_name
        return {
            f"{prefix}.{name}": StackedParameter(one.parameter, tuple(f"{prefix}.{covered}" for covered in one.covers))
            for name, one in self.experts.stacked_parameters().items()
        }

    def __call__(
        self, x: Tensor, adapters: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        """`adapters`: as `Linear` takes them.  `routed`: the chosen experts' ids [T,k] int32 are appended to it."""
        logits = self.router.linear(x, torch.float32)
        ids, weights = self.router.choose(logits)
        if routed is not None:
            routed.append(ids)
        shared = None if self.shared is None else self.shared(x, adapters)
        gate = None if self.shared_gate is None else self.shared_gate(x, torch.float32)
        if self.spec.scales_input:
            x = ops.scale_rows(x, weights.view(-1))
            _, weights = self.router.choose(logits, normalize=True)  # 1
        return self.experts(x, ids, weights, shared, gate)


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as `dtype`, each of its rows without gaps."""
    rows = tensor.to(dtype)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _transposed(tensor: Tensor) -> Iterator[Tensor]:
    """Each matrix [K,N] of [E,K,N] as [N,K], in memory that the next one takes: what is allocated for each would leave
    gaps among what is kept."""
    rows = tensor.new_empty(tensor.shape[2], tensor.shape[1])
    for matrix in tensor:
        yield rows.copy_(matrix.t())


def _other(shard: str) -> str:
    return "up" if shard == "gate" else "gate"


def _deinterleaved(rows: Tensor) -> Tensor:
    """Rows 0, 2, 4, ... above rows 1, 3, 5, ..."""
    return torch.cat((rows[::2], rows[1::2]))
