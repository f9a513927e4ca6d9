"""The head of a classifier: hidden rows to float32 logits of its labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tokserve import ops
from tokserve.base.errors import StartError
from tokserve.features.pooling.classifier import HeadSpec, head_spec
from tokserve.layers.embedding import Head
from tokserve.layers.linear import Activation, Linear
from tokserve.layers.norm import NoNorm, NormSpec, make_norm
from tokserve.layers.options import LayerOptions
from tokserve.layers.parallel import OPTION
from tokserve.layers.parameter import Parameter, under
from tokserve.models.decoder import DecoderSpec

NAME = "score"


@dataclass(frozen=True, slots=True)
class DecoderHeadSpec:
    """The head that config.json gives a decoder."""

    labels: HeadSpec

    def layer(self, hidden: int, options: LayerOptions, head: Head) -> Classifier:
        """The head without weights.  Raises StartError."""
        if self.labels.tokens and options.group.size > 1:
            raise StartError(f"{OPTION}: a classifier whose labels are rows of the head runs on one rank")
        return Classifier(self.labels, hidden, head)


def with_classifier(spec: DecoderSpec, hf: Mapping[str, Any]) -> DecoderSpec:
    """The same with the head of a classifier.  With a weight of its own there is no head for tokens in the checkpoint:
    tied to the embedding, it needs no memory."""
    head = head_spec(hf)
    return replace(spec, classifier=DecoderHeadSpec(head), tied=spec.tied or not head.tokens)


class Classifier:
    """A weight of its own, never quantized, in the dtype of the language model's `head`; or some rows of that head."""

    def __init__(self, spec: HeadSpec, hidden: int, head: Head) -> None:
        self.spec = spec
        self.head = head
        options = LayerOptions(head.dtype)
        self.linear = None if spec.tokens else Linear(hidden, {NAME: spec.labels}, options, bias=spec.per_token)

    def parameters(self) -> dict[str, Parameter]:
        """`score.weight` [labels, hidden], if it has a weight of its own; with a bias, if it labels tokens."""
        return {} if self.linear is None else self.linear.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, labels] float32
        if self.linear is not None:
            return self.linear(hidden.to(self.linear.dtype), out_dtype=torch.float32)
        chosen = self.head(hidden)[:, list(self.spec.tokens)]
        return chosen[:, 1:] - chosen[:, :1] if self.spec.difference else chosen


@dataclass(frozen=True, slots=True)
class EncoderHeadSpec:
    """An encoder's head: a projection `dense` with an activation and perhaps a norm, then that to the labels, `out`.
    `dense` "": there is only the last.  `dense_bias`: of the first projection; the last always has one."""

    labels: int
    dense: str = ""
    activation: Activation | Literal["tanh"] = "tanh"
    dense_bias: bool = True
    norm: NormSpec | None = None
    norm_name: str = ""
    out: str = "classifier"

    def layer(self, hidden: int, options: LayerOptions, head: Head) -> EncoderHead:
        """The head without weights, in the model's dtype."""
        return EncoderHead(self, hidden, LayerOptions(options.dtype))


class EncoderHead:
    """Pooled rows, or those of all tokens, to the logits of labels; never quantized."""

    def __init__(self, spec: EncoderHeadSpec, hidden: int, options: LayerOptions) -> None:
        self.spec = spec
        self.dense = Linear(hidden, {spec.dense: hidden}, options, bias=spec.dense_bias) if spec.dense else None
        self.norm = NoNorm() if spec.norm is None else make_norm(hidden, spec.norm, options.dtype)
        self.out = Linear(hidden, {spec.out: spec.labels}, options, bias=True)

    def parameters(self) -> dict[str, Parameter]:
        parameters = {} if self.dense is None else self.dense.parameters()
        return parameters | under(self.spec.norm_name, self.norm.parameters()) | self.out.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, labels] float32
        x = hidden.to(self.out.dtype)
        if self.dense is not None:
            x = self.dense(x)
            if self.spec.activation == "tanh":
                x = torch.tanh(x.float()).to(x.dtype)
            else:
                x = ops.activate(x, self.spec.activation)
        return self.out(self.norm(x), out_dtype=torch.float32)
