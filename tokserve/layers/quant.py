"""How a linear layer keeps and multiplies its weight: the `QuantMethod` protocol, and weights as they are.

A method packs a weight and multiplies rows with what it packed; it holds no state, so one object serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.parameter import StoredWeight

PIECE = 1 << 20  # elements that are converted at once
GROUP = 128  # inputs that share a scale where nothing else is asked for
STORED_INTEGERS = "wna16"  # the method that keeps integers, and floats, as a checkpoint stores them
Packed = ops.PackedWeight | ops.PackedInt8 | ops.PackedFloat8 | ops.PackedWna16


class QuantMethod(Protocol):
    """`linear(x, pack(weight), bias, None)` is x [T, inputs] times weight [outputs, inputs], transposed, plus bias.

    With `gated_linear` and `pack_gated`, activation(first half) * second half of that.  Only the method that packed a
    weight can multiply with it.
    """

    name: str | None  # the value of the option `quantization`; None: none
    covers_experts: bool  # there are products for a mixture of experts
    keeps_floats: bool  # a weight of floats stays one
    packs_rows: bool  # `pack` and `pack_gated` take tensors of floats in several parts, with the `rest` of the op

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What an element of a weight of `dtype` is kept as."""

    def accepts(self, stored: StoredWeight) -> bool:
        """Whether `pack` takes a weight in the form in which it is stored; others it takes as tensors of floats."""

    def pack(self, weight: Any, *rest: Any) -> Packed:
        """Pack a tensor of floats, or a StoredWeight that `accepts` accepted; nothing of it is kept."""

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """[T, outputs] in `out_dtype`; None: x's dtype."""

    def pack_gated(self, weight: Any, *rest: Any) -> Packed:
        """Pack a gate projection's rows and the up projection's, as `pack` does."""

    def experts(self, *arguments: Any) -> Tensor:
        """The outputs of a mixture of packed weights, as `ops.experts` gives them; only if it covers them."""

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        """[T, outputs / 2] in x's dtype; activation None: the product itself, [T, outputs]."""


class Unquantized:
    """The weight in its own dtype."""

    name: str | None = None
    keeps_floats = True
    covers_experts = True
    packs_rows = True

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """A weight is kept in its own dtype."""
        return dtype

    def accepts(self, stored: StoredWeight) -> bool:
        """False: it takes tensors of floats alone."""
        return False

    def pack(self, weight: Tensor, *rest: Any) -> Packed:
        return ops.pack_linear(weight, *rest)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """Multiply with `ops.linear`, which sums in float32."""
        return ops.linear(x, packed, bias, out_dtype)

    def pack_gated(self, weight: Tensor, *rest: Any) -> Packed:
        return ops.pack_gated(weight, *rest)

    def gated_linear(self, x: Tensor, packed: Any, bias: Tensor | None, activation: str | None) -> Tensor:
        """Multiply and gate in one op."""
        return ops.gated_linear(x, packed, bias, activation)

    def experts(self, *arguments: Any) -> Tensor:
        """The outputs of a mixture; arguments as those of the op."""
        return ops.experts(*arguments)


def pack_rows(
    pack: Callable[..., Packed], tensor: Tensor, dtype: torch.dtype, rows: int, first: int = 0, into: Any = None
) -> Any:
    """Pack the tensor [N,K] as `dtype`: rows `first` .. of a weight [rows,K], as `ops.pack_linear` takes them.  What
    has another dtype is converted a few rows at a time, so that there is no second tensor."""
    step = len(tensor) if tensor.dtype == dtype else max(1, PIECE // tensor.shape[1])
    for start in range(0, len(tensor), step):
        piece = tensor[start : start + step].to(dtype)
        into = pack(piece if piece.stride(1) == 1 else piece.contiguous(), rows, first + start, into)
    return into


def gated(both: Tensor, activation: str | None) -> Tensor:
    """activation(first half) * second half of a gated product [T, 2 * inner]; None: the product itself."""
    if activation is None:
        return both
    if activation == "silu":
        return ops.silu_mul(both)
    return ops.gelu_mul(both) if activation == "gelu_tanh" else ops.activate(both, activation, True)


UNQUANTIZED = Unquantized()
