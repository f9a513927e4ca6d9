"""Where a checkpoint tensor goes: its expected shape and the function that takes it.

Layers name their parameters in short; a model joins these into checkpoint names, and `models/weights` loads tensors
into them.  A `load` copies (a checkpoint file may be mapped into memory and change later) and converts to the layer's
dtype; loading again replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.parallel import Span
from tokserve.layers.places import NOWHERE, MatrixPlace, Place, TensorPart, TransposedMatrixPlace

T = TypeVar("T")


class StoredWeight(Protocol):
    """A weight [N,K] in the form in which a checkpoint stores it, which is not a tensor of floats."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [N,K] of the matrix."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values that it means."""

    def dense(self) -> Tensor:
        """What it means: [N,K] of `dtype`."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it is stored in."""

    def clone(self) -> StoredWeight:
        """A copy in memory of its own."""

    def narrow(self, dim: int, start: int, length: int) -> Tensor | StoredWeight:
        """`length` rows (`dim` 0) or columns (1) from `start` on; it may share this weight's memory."""

    def joined(self, others: Sequence[StoredWeight]) -> StoredWeight | None:
        """This weight's rows and those of the others; None: they cannot be stored as one weight."""

    def packed_rows(self) -> ops.PackedWna16 | None:
        """The weight packed so that its rows can be looked up; None: that is not done in this form."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """`load` takes one tensor of `shape` in any floating dtype; it is kept as `dtype`, `offset` added.

    `shape` is the checkpoint's: a rank of several loads its part of the tensor.
    `load_stored` takes a weight as it is stored; None: `load` is given what it means.
    `rounded`: the dtype to which `load` rounds a tensor before anything else, if it is not `dtype`.
    `places`: where the elements are once they are loaded; the first can be read, and each has to be written.  Empty:
    they are not kept as `rounded`.  `share`: of the elements, how many this rank keeps; `held`: which, counted by the
    places from 0; None: all of them.  `random_gain`: what random values of it are multiplied by.  `transposed`: of a
    projection, as [inputs, outputs].
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    dtype: torch.dtype
    load_stored: Callable[[StoredWeight], None] | None = None
    offset: float = 0.0
    rounded: torch.dtype | None = None
    places: Callable[[], Sequence[Place]] = tuple
    share: float = 1.0
    held: TensorPart | None = None
    random_gain: float = 1.0
    transposed: bool = False

    @property
    def source_dtype(self) -> torch.dtype:
        """A tensor may be rounded to it before it is loaded: the result has the same bits."""
        return self.rounded or self.dtype

    def take(self, weight: Tensor | StoredWeight) -> None:
        """Load it, however it is stored."""
        if isinstance(weight, Tensor):
            self.load(weight)
        elif self.load_stored is None:
            self.load(weight.dense())
        else:
            self.load_stored(weight)


@dataclass(frozen=True, slots=True)
class StackedParameter:
    """A tensor that holds what the parameters `covers` hold, of all experts: a checkpoint has it or them."""

    parameter: Parameter
    covers: tuple[str, ...]

    def parts(self, whole: Tensor) -> dict[str, Tensor]:
        """Views of such a tensor, which is not transposed, by the names that it covers."""
        shards = len(self.covers) // len(whole)  # of an expert
        views = [view for expert in whole.unbind() for view in expert.chunk(shards)]
        return dict(zip(self.covers, views, strict=True))


def as_dense(weight: Tensor | StoredWeight) -> Tensor:
    """The weight as a tensor of floats."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def part_of(weight: Tensor | StoredWeight, dim: int, spans: Sequence[Span]) -> Tensor | StoredWeight:
    """Some rows (`dim` 0) or columns (1) of a weight, as it is stored if that can be divided so.  Columns are in one
    span."""
    parts = [weight.narrow(dim, *span) for span in spans]
    if len(parts) == 1:
        return parts[0]
    first, *others = parts
    if not isinstance(first, Tensor):
        stored = [one for one in others if not isinstance(one, Tensor)]
        joined = first.joined(stored) if len(stored) == len(others) else None
        if joined is not None:
            return joined
    return torch.cat([as_dense(one) for one in parts])


def transposed(weight: Parameter) -> Parameter:
    """A projection's weight as a checkpoint has it that stores [inputs, outputs]."""
    outputs, inputs = weight.shape

    def places() -> list[Place]:
        return [
            TransposedMatrixPlace(place, _held_rows(weight))
            for place in weight.places()
            if isinstance(place, MatrixPlace)
        ]

    return replace(
        weight,
        shape=(inputs, outputs),
        load=lambda tensor: weight.load(tensor.t().contiguous()),
        load_stored=None,
        places=places,
        held=None if weight.held is None else weight.held.transposed(),
        transposed=True,
    )


def _held_rows(weight: Parameter) -> int:
    """How many rows of a weight this rank has."""
    if weight.held is None or weight.held.dim == 1:
        return weight.shape[0]
    return sum(span.length for span in weight.held.spans)


def on_another_rank(named: dict[str, Parameter]) -> dict[str, Parameter]:
    """The same of which nothing is kept: another rank has these tensors."""
    return {
        name: replace(one, load=_drop, load_stored=_drop, places=tuple, share=0.0, held=NOWHERE)
        for name, one in named.items()
    }


def _drop(weight: object) -> None:
    """Ignore a weight that another rank keeps."""


def under(prefix: str, named: dict[str, T]) -> dict[str, T]:
    """The same with `prefix.` before each name, unless the prefix is empty."""
    return {f"{prefix}.{name}" if prefix else name: value for name, value in named.items()}


def owned_copy(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous copy in own memory, on the device of the bound ops; ValueError for another shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"expected a tensor of shape {list(shape)}, found {list(tensor.shape)}")
    return torch.empty(shape, dtype=dtype, device=ops.torch_device).copy_(tensor)
