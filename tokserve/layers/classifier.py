"""The head of a classifier: hidden rows to float32 logits of its labels."""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.classifier import HeadSpec
from tokserve.layers.embedding import Head
from tokserve.layers.linear import Linear
from tokserve.layers.options import LayerOptions
from tokserve.layers.parameter import Parameter

NAME = "score"


class Classifier:
    """A weight of its own, never quantized, in the dtype of the language model's `head`; or some rows of that head."""

    def __init__(self, spec: HeadSpec, hidden: int, head: Head) -> None:
        self.spec = spec
        self.head = head
        options = LayerOptions(head.dtype)
        self.linear = None if spec.tokens else Linear(hidden, {NAME: spec.labels}, options)

    def parameters(self) -> dict[str, Parameter]:
        """`score.weight` [labels, hidden], if it has a weight of its own."""
        return {} if self.linear is None else self.linear.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, labels] float32
        if self.linear is not None:
            return self.linear(hidden.to(self.linear.dtype), out_dtype=torch.float32)
        chosen = self.head(hidden)[:, list(self.spec.tokens)]
        return chosen[:, 1:] - chosen[:, :1] if self.spec.difference else chosen
