"""One layer of a decoder: what it consists of, and the layer itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.linear import Linear
from tokserve.layers.norm import NoNorm, NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, StackedParameter, owned_copy, transposed, under
from tokserve.layers.places import VectorPlace
from tokserve.layers.protocols import FeedForwardSpec, InputGateSpec, MixerSpec


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """Where a block has norms: their names in a checkpoint, "" for none."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


BEFORE = BlockNorms()
AROUND = BlockNorms(  # Gemma's
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
AFTER = BlockNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")  # OLMo's
SINGLE = BlockNorms(before_mlp="")  # of parallel blocks, and of those without an MLP


@dataclass(frozen=True, slots=True)
class NoMLPSpec:
    """Stands where a layer has no feed-forward block; its norms are `SINGLE`."""

    @property
    def has_experts(self) -> bool:
        return False

    @property
    def routing(self) -> None:
        return None

    def layer(self, hidden: int, options: LayerOptions) -> NoMLP:
        """The layer, which has no weights."""
        return NoMLP()

    def as_stored(self, hidden: int, shapes: Mapping[str, tuple[int, ...]]) -> NoMLPSpec:
        """Itself: a checkpoint stores nothing of it."""
        return self


class NoMLP:
    """Returns what it is given, without weights."""

    def linears(self) -> dict[str, Linear]:
        return {}

    def parameters(self) -> dict[str, Parameter]:
        return {}

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        return {}

    def __call__(
        self, x: Tensor, adapters: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> Tensor:  # [T, hidden], the same
        return x


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One layer.  `norm` is at the places that `norms` says.

    `parallel`: attention and MLP are given the residual stream before either is added to it, the MLP after the same
    norm, unless it has one of its own.
    `attention` may be a layer with a recurrent state in its place.  With a `NoMLPSpec` the layer adds what comes of
    attention alone; if it is `parallel` too, the next layer's attention is given what its own is given.
    `residual_multiplier`: of what is added to the stream.  `mlp_name`, `attention_name`: of their modules in a
    checkpoint.  `factor_name`: of a tensor of one element that multiplies the stream after the layer; "": there is
    none.  `transposed`: a checkpoint stores the projections' weights as [inputs, outputs].  `gate`: of inputs of the
    layer besides the stream, after the MLP.
    """

    attention: MixerSpec
    mlp: FeedForwardSpec
    norm: NormSpec
    norms: BlockNorms = BEFORE
    parallel: bool = False
    residual_multiplier: float = 1.0
    mlp_name: str = "mlp"
    attention_name: str = "self_attn"
    factor_name: str = ""
    transposed: bool = False
    gate: InputGateSpec | None = None


class DecoderBlock:
    """One layer: attention and feed-forward, one after the other or side by side, and norms before or after them."""

    def __init__(self, hidden: int, spec: BlockSpec, options: LayerOptions) -> None:
        def norm(name: str) -> NoNorm:
            return make_norm(hidden, spec.norm, options.dtype) if name else NoNorm()

        self.norm_names, self.mlp_name, self.attention_name = spec.norms, spec.mlp_name, spec.attention_name
        self.parallel, self.residual_multiplier = spec.parallel, spec.residual_multiplier
        self.transposed = spec.transposed
        self.attention_norm, self.mlp_norm = norm(spec.norms.before_attention), norm(spec.norms.before_mlp)
        self.attention_post_norm, self.mlp_post_norm = norm(spec.norms.after_attention), norm(spec.norms.after_mlp)
        self.attention = spec.attention.layer(hidden, options)
        self.mlp = spec.mlp.layer(hidden, options)
        self.has_mlp = not isinstance(self.mlp, NoMLP)
        self.gate = None if spec.gate is None else spec.gate.layer(hidden, options)
        self.factor_name = spec.factor_name
        self.factor = torch.ones(1, device=ops.torch_device) if spec.factor_name else None  # [1] float32
        self.has_two_norms = spec.parallel and bool(spec.norms.before_mlp)

    def linears(self) -> dict[str, Linear]:
        """The projections, each after the Hugging Face name of the module that it is in."""
        linears = under(self.attention_name, self.attention.linears()) | under(self.mlp_name, self.mlp.linears())
        return linears if self.gate is None else linears | self.gate.linears()

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of Hugging Face checkpoints."""
        names = self.norm_names
        norms = (
            (names.before_attention, self.attention_norm),
            (names.after_attention, self.attention_post_norm),
            (names.before_mlp, self.mlp_norm),
            (names.after_mlp, self.mlp_post_norm),
        )
        parameters = under(self.attention_name, self.attention.parameters())
        parameters |= under(self.mlp_name, self.mlp.parameters())
        if self.transposed:
            parameters = {name: transposed(one) if len(one.shape) == 2 else one for name, one in parameters.items()}
        for name, norm in norms:
            parameters |= under(name, norm.parameters())
        if self.gate is not None:
            parameters |= self.gate.parameters()
        if self.factor is not None:
            parameters[self.factor_name] = Parameter((1,), self.load_factor, torch.float32, places=self.factor_places)
        return parameters

    def factor_places(self) -> list[VectorPlace]:
        assert self.factor is not None
        return [VectorPlace(self.factor)]

    def load_factor(self, tensor: Tensor) -> None:
        """Take the factor of the stream."""
        self.factor = owned_copy(tensor, (1,), torch.float32)

    def end(
        self,
        x: Tensor,
        residual: Tensor,
        following: NoNorm,
        inputs: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(the following norm of the stream after this layer, the stream), of what the layer adds at last [T, hidden]
        and of what it is added to.  `inputs`: as the gate takes them."""
        if self.factor is None and self.gate is None:
            return following.add(x, residual, self.residual_multiplier)
        total = ops.add_residual(x, residual, self.residual_multiplier)
        if self.gate is not None and inputs is not None:
            total = self.gate(total, inputs, adapters)
        total = total if self.factor is None else ops.scale_rows(total, self.factor)
        return following(total), total

    def borrow(self, other: DecoderBlock) -> None:
        """Use another's norms, sinks and factor; the spec is the same.  Raises StartError for recurrent states."""
        self.attention_norm, self.attention_post_norm = other.attention_norm, other.attention_post_norm
        self.mlp_norm, self.mlp_post_norm, self.factor = other.mlp_norm, other.mlp_post_norm, other.factor
        self.attention.borrow(other.attention)
        if self.gate is not None:
            self.gate.borrow(other.gate)
