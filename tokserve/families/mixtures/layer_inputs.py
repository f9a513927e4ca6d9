"""Inputs of each layer besides the residual stream, as Gemma 4's small models have them.

A second embedding has a row of all layers' inputs for each token; a projection of the token's embedding is added to it.
Each layer gates its part and adds what it projects of it to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tokserve import ops
from tokserve.layers.embedding import Embedding
from tokserve.layers.linear import Activation, Linear
from tokserve.layers.norm import NormSpec, RMSNorm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import ALONE
from tokserve.layers.parameter import Parameter, under

HALF = 2.0**-0.5  # of the sum of two inputs


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """`layers` inputs of `width` for each of `vocab` tokens."""

    vocab: int
    layers: int
    width: int
    norm: NormSpec

    def layer(self, hidden: int, options: LayerOptions) -> PerLayerInputs:
        """The layer without weights."""
        return PerLayerInputs(hidden, self, options)


class PerLayerInputs:
    """Both embeddings' inputs of all layers."""

    def __init__(self, hidden: int, spec: PerLayerSpec, options: LayerOptions) -> None:
        self.width, total = spec.width, spec.layers * spec.width
        self.embedding = Embedding(spec.vocab, total, options.dtype, multiplier=spec.width**0.5, group=options.group)
        self.projection = Linear(hidden, {"per_layer_model_projection": total}, LayerOptions(options.dtype))
        self.scale = hidden**-0.5
        self.norm = RMSNorm(spec.width, spec.norm, options.dtype)

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of Hugging Face checkpoints."""
        return (
            under("embed_tokens_per_layer", self.embedding.parameters())
            | self.projection.parameters()
            | under("per_layer_projection_norm", self.norm.parameters())
        )

    def __call__(self, ids: Tensor, embeddings: Tensor) -> Tensor:  # [T], [T, hidden] -> [T, layers * width]
        looked_up = self.embedding(ids)
        projected = ops.cap(self.projection(embeddings), self.scale, 0.0)
        normed = self.norm(projected.view(-1, self.width)).view(looked_up.shape)
        return ops.cap(ops.add_residual(normed, looked_up), HALF, 0.0)


@dataclass(frozen=True, slots=True)
class PerLayerGateSpec:
    """The gate of the inputs [.., number * width : (number + 1) * width] of all layers'."""

    number: int
    width: int
    activation: Activation
    norm: NormSpec

    def layer(self, hidden: int, options: LayerOptions) -> PerLayerGate:
        """The gate without weights."""
        return PerLayerGate(hidden, self, options)


class PerLayerGate:
    """stream + norm(projection(activation(gate(stream)) * inputs)); ranks do not divide it."""

    def __init__(self, hidden: int, spec: PerLayerGateSpec, options: LayerOptions) -> None:
        whole = replace(options, group=ALONE)
        self.spec = spec
        self.gate = Linear(hidden, {"per_layer_input_gate": spec.width}, whole)
        self.projection = Linear(spec.width, {"per_layer_projection": hidden}, whole)
        self.norm = RMSNorm(hidden, spec.norm, options.dtype)

    def linears(self) -> dict[str, Linear]:
        """The projections by name."""
        return {"input_gate": self.gate, "input_projection": self.projection}

    def parameters(self) -> dict[str, Parameter]:
        """Under the names of Hugging Face checkpoints."""
        parameters = self.gate.parameters() | self.projection.parameters()
        return parameters | under("post_per_layer_input_norm", self.norm.parameters())

    def borrow(self, other: object) -> None:
        """Use another's norm."""
        assert isinstance(other, PerLayerGate)
        self.norm = other.norm

    def __call__(self, stream: Tensor, inputs: Tensor, adapters: Tensor | None) -> Tensor:  # [T, hidden] -> same
        gate = self.gate(stream, adapters=adapters)
        mixed = ops.gate_inputs(gate, inputs, self.spec.number, self.spec.activation)
        return ops.add_residual(self.norm(self.projection(mixed, adapters=adapters)), stream)
