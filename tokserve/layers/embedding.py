"""Token embedding and output head.

Both hold a [vocabulary, hidden] weight, which tied models share: the embedding reads rows of it, the head
has it packed for the linear op.  Logits leave here as float32 always.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tokserve.layers.linear import Linear
from tokserve.layers.parameter import Parameter, owned_copy


class Embedding:
    """Row lookup.  `head`: an output head tied to this weight, loaded with it."""

    weight: Tensor  # [vocab, hidden]

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, *, head: Head | None = None) -> None:
        self.vocab = vocab
        self.hidden = hidden
        self.dtype = dtype
        self.head = head

    def parameters(self) -> dict[str, Parameter]:
        """`weight`."""
        return {"weight": Parameter((self.vocab, self.hidden), self.load)}

    def load(self, tensor: Tensor) -> None:
        """Take the weight [vocab, hidden], for the tied head too."""
        self.weight = owned_copy(tensor, (self.vocab, self.hidden), self.dtype)
        if self.head is not None:
            self.head.tie(self.weight)

    def __call__(self, ids: Tensor) -> Tensor:  # [T] int64 -> [T, hidden]
        return functional.embedding(ids, self.weight)


class Head:
    """Hidden rows to float32 logits; `dtype` is the type of the product's operands."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.linear = Linear(hidden, {"lm_head": vocab}, dtype)

    def parameters(self) -> dict[str, Parameter]:
        """`lm_head.weight`."""
        return self.linear.parameters()

    def tie(self, weight: Tensor) -> None:
        """Use an embedding's weight [vocab, hidden]."""
        self.linear.adopt(weight.to(self.dtype))

    def __call__(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, vocab] float32
        return self.linear(hidden.to(self.dtype), out_dtype=torch.float32)
