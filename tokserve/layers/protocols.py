"""What a decoder's block needs of its two layers, and of the specs that build them.

A decoder is built and run through these protocols alone, so a new kind of layer changes no file but its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tokserve.layers.batch import ForwardBatch, LogitsRows
from tokserve.layers.embedding import Head
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter, StackedParameter
from tokserve.layers.rope import RopeSpec
from tokserve.protocol.kv_spec import LayerSpec

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of queries by number, tables, query_start and seq_lens


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """The attention of a layer, without its weights, for a check of its arithmetic.

    `kind`: equal for layers whose arithmetic is the same.  `name`: for messages.  `attend`: takes the layer's first
    cache tensor, of which only shape and dtype count, and a number of tokens; returns a function that attends with
    random queries over random keys and values of so many tokens.
    """

    kind: tuple[Any, ...]
    name: str
    attend: Callable[[Tensor, int], Attend]


def random_rows(seed: int, *shape: int) -> Tensor:
    """Normal values, float32 on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TokenMixer(Protocol):
    """The layer of a block in which tokens meet: attention, or a layer with a recurrent state.

    `k_scale`, `v_scale`: what the keys and values of a float8 cache are multiplied by; 1 for layers without one.
    """

    @property
    def k_scale(self) -> float: ...

    @property
    def v_scale(self) -> float: ...

    def linears(self) -> dict[str, Linear]:
        """The projections by name."""

    def parameters(self) -> dict[str, Parameter]:
        """The parameters under the checkpoint's names, without the name of the module."""

    def borrow(self, other: object) -> None:
        """Use what another layer of the same spec has besides its projections.  Raises StartError for states."""

    def kv_spec(self) -> LayerSpec:
        """What the cache keeps for this layer."""

    def row_elements(self) -> int:
        """Elements of a token's intermediate results that are no projection's outputs."""

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """Divide the keys and values that a float8 cache keeps by these."""

    def probe(self) -> AttentionProbe | None:
        """What the start's check of attention calls; None for layers that do not attend."""

    def __call__(
        self, x: Tensor, batch: ForwardBatch, layer: int, table: Tensor, logits_rows: LogitsRows | None = None
    ) -> Tensor:  # [T, hidden] -> same, or [n, hidden] of the n tokens of `logits_rows`
        ...


class MixerSpec(Protocol):
    """Describes a `TokenMixer`, and builds it.  `rope`: the table that its calls are given."""

    @property
    def rope(self) -> RopeSpec: ...

    def layer(self, hidden: int, options: LayerOptions) -> TokenMixer:
        """The layer without weights; `hidden` is the width of inputs and outputs.  Raises StartError."""


class FeedForward(Protocol):
    """The layer of a block that computes each token by itself."""

    def linears(self) -> dict[str, Linear]:
        """The projections by name."""

    def parameters(self) -> dict[str, Parameter]:
        """The parameters under the checkpoint's names, without the name of the module."""

    def stacked_parameters(self) -> dict[str, StackedParameter]:
        """Tensors that a checkpoint may have in place of some of `parameters`."""

    def __call__(
        self, x: Tensor, adapters: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> Tensor:  # [T, hidden] -> same
        """`adapters`: as `Linear` takes them.  A layer that routes tokens appends the chosen ids [T, k] to `routed`."""


class Routing(NamedTuple):
    """How many experts a layer has, and how many of them compute a token."""

    experts: int
    chosen: int


class FeedForwardSpec(Protocol):
    """Describes a `FeedForward`, and builds it."""

    @property
    def routing(self) -> Routing | None:
        """How a layer with experts chooses among them; None: it has none."""

    @property
    def has_experts(self) -> bool:
        """Whether each token is computed by some of many experts."""

    def layer(self, hidden: int, options: LayerOptions) -> FeedForward:
        """The layer without weights; `hidden` is the width of inputs and outputs.  Raises StartError."""

    def as_stored(self, hidden: int, shapes: Mapping[str, tuple[int, ...]]) -> FeedForwardSpec:
        """The spec of the layer as a checkpoint stores it, by the shapes of its tensors under their names within the
        layer."""


class LayerInputs(Protocol):
    """Makes inputs of each layer from token ids and their embeddings."""

    def parameters(self) -> dict[str, Parameter]:
        """The parameters under the checkpoint's names."""

    def __call__(self, ids: Tensor, embeddings: Tensor) -> Tensor:  # [T], [T, hidden] -> [T, layers * width]
        ...


class LayerInputsSpec(Protocol):
    """Describes `LayerInputs`, and builds them."""

    def layer(self, hidden: int, options: LayerOptions) -> LayerInputs:
        """The layer without weights.  Raises StartError."""


class InputGate(Protocol):
    """The last part of a block of a model with `LayerInputs`."""

    def linears(self) -> dict[str, Linear]:
        """The projections by name."""

    def parameters(self) -> dict[str, Parameter]:
        """The parameters under the checkpoint's names, without the name of the block."""

    def borrow(self, other: object) -> None:
        """Use what another of the same spec has besides its projections."""

    def __call__(self, stream: Tensor, inputs: Tensor, adapters: Tensor | None) -> Tensor:  # [T, hidden] -> same
        """The residual stream with what comes of the inputs [T, layers * width]; `adapters`: as `Linear` takes them."""


class InputGateSpec(Protocol):
    """Describes an `InputGate`, and builds it."""

    def layer(self, hidden: int, options: LayerOptions) -> InputGate:
        """The gate without weights."""


class LabelHead(Protocol):
    """Makes the logits of a classifier's labels from hidden rows."""

    def parameters(self) -> dict[str, Parameter]:
        """The parameters under the checkpoint's names."""

    def __call__(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, labels] float32
        ...


class LabelHeadSpec(Protocol):
    """Describes a `LabelHead`, and builds it."""

    def layer(self, hidden: int, options: LayerOptions, head: Head) -> LabelHead:
        """The head without weights.  `head`: the language model's.  Raises StartError."""


class ImageTower(Protocol):
    """The part of a model that makes embeddings of an image."""

    def parameters(self) -> dict[str, Parameter]:
        """The parameters under the checkpoint's names."""

    def __call__(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Embeddings [1 + taps, tokens, outputs] of normalized patches [n, pixels] float32; `grid`: (1, height, width)
        in patches."""

    def activation_bytes(self, tokens: int) -> int:
        """Bytes that an image of so many embeddings takes at most while it is computed; an estimate."""


class TowerSpec(Protocol):
    """Describes an `ImageTower`, and builds it."""

    def tower(self, options: LayerOptions) -> ImageTower:
        """The tower without weights."""
