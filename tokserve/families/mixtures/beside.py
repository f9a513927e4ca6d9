"""A mixture of experts beside a dense MLP, as Gemma 4 has it: each has norms of its own, and both are added.

The layer is given the residual stream itself.  Its router reads a norm of the stream, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve import ops
from tokserve.families.mixtures.experts import Mixture, MixtureSpec
from tokserve.layers.linear import Linear
from tokserve.layers.mlp import GatedMLP, MLPSpec
from tokserve.layers.norm import NormSpec, RMSNorm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, StackedParameter, owned_copy, under
from tokserve.layers.places import VectorPlace
from tokserve.layers.protocols import Routing

NORMS = (  # before and after the MLP, before and after the experts
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


@dataclass(frozen=True, slots=True)
class BesideSpec:
    """`plain` and `mixture` side by side; the names of their tensors are those in the block."""

    plain: MLPSpec
    mixture: MixtureSpec
    norm: NormSpec

    @property
    def has_experts(self) -> bool:
        return True

    @property
    def routing(self) -> Routing:
        return self.mixture.routing

    def layer(self, hidden: int, options: LayerOptions) -> MixtureBeside:
        """The layer without weights."""
        return MixtureBeside(hidden, self, options)

    def as_stored(self, hidden: int, shapes: Mapping[str, tuple[int, ...]]) -> BesideSpec:
        """Itself: checkpoints store its projections in one way."""
        return self


class MixtureBeside:
    """The feed-forward part of a block: an MLP, and experts beside it.

    The router's input is a norm of the stream times a vector and `hidden` ** -0.5.  The weight of an expert
    is multiplied by the expert's factor.
    """

    factors: Tensor  # [E] float32

    def __init__(self, hidden: int, spec: BesideSpec, options: LayerOptions) -> None:
        self.spec, self.experts_number = spec, spec.mixture.experts
        self.plain = GatedMLP(hidden, spec.plain, options)
        self.mixture = Mixture(hidden, spec.mixture, options)
        self.norms = {name: RMSNorm(hidden, spec.norm, options.dtype) for name in NORMS}
        self.router_norm = RMSNorm(hidden, spec.norm, options.dtype)
        self.router_scale = hidden**-0.5

    def linears(self) -> dict[str, Linear]:
        """Projections that adapters can change: those of the MLP."""
        return under("mlp", self.plain.linears())

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of Hugging Face checkpoints."""
        parameters = under("mlp", self.plain.parameters()) | self.mixture.parameters()
        for name, norm in self.norms.items():
            parameters |= under(name, norm.parameters())
        parameters["router.scale"] = self.router_norm.parameters()["weight"]
        parameters["router.per_expert_scale"] = Parameter(
            (self.experts_number,), self.load_factors, torch.float32, places=self.factor_places
        )
        return parameters

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        """What a checkpoint may have in place of a tensor for each expert."""
        return self.mixture.stacked_parameters()

    def factor_places(self) -> list[VectorPlace]:
        return [VectorPlace(self.factors)]

    def load_factors(self, tensor: Tensor) -> None:
        """Take the experts' factors."""
        self.factors = owned_copy(tensor, (self.experts_number,), torch.float32)

    def __call__(
        self, x: Tensor, adapters: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> Tensor:  # [T, hidden] -> [T, hidden]
        """`x`: the residual stream.  `adapters`, `routed`: as those of a `Mixture`."""
        before, after, before_experts, after_experts = self.norms.values()
        plain = after(self.plain(before(x), adapters))
        router = self.mixture.router
        logits = ops.cap(router.linear(self.router_norm(x), torch.float32), self.router_scale, 0.0)
        ids, weights = router.choose(logits)
        if routed is not None:
            routed.append(ids)
        weights = ops.scale_choices(weights, ids, self.factors)
        mixed = self.mixture.experts(before_experts(x), ids, weights, None, None)
        return ops.add_residual(after_experts(mixed), plain)
