"""How a layer's weights are divided among the ranks that share a model, and what the ranks do together.

Ranks add what each has computed in the order of their numbers: the bits depend on how many there are, and on nothing
else.  This file knows no transport; `features/ranks/collectives` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tokserve.base.errors import StartError

Split = Literal["column", "row"]  # by output features, by input features
OPTION = "option tensor_parallel_size"


class Span(NamedTuple):
    """Rows of a tensor that a rank has."""

    start: int
    length: int


def is_whole(spans: Sequence[Span], total: int) -> bool:
    """Whether the spans are all rows 0 .. total - 1, in order."""
    ends = [0, *(start + length for start, length in spans)]
    return ends[-1] == total and all(span.start == end for span, end in zip(spans, ends, strict=False))


class Collectives(Protocol):
    """What all ranks of a group call with tensors of the same shape, in the same order."""

    def add(self, part: Tensor) -> Tensor:
        """The parts (float32) of all ranks, added in rank order, on every rank."""

    def gather(self, part: Tensor) -> Tensor:
        """The parts [n, w] of all ranks side by side, [n, size * w], on rank 0; elsewhere [n, 0]."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share a model: this one's number, and how many there are.  `collectives`: None where one rank of
    several is looked at alone; then nothing is added."""

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = field(default=None, compare=False)

    def share(self, total: int, name: str) -> int:
        """A rank's part of `total`.  Raises StartError, saying `name`, if the parts are not equal."""
        if total % self.size:
            raise StartError(f"{OPTION}: {name} {total} cannot be divided among {self.size} ranks")
        return total // self.size

    def span(self, total: int, name: str) -> Span:
        """This rank's part of `total` rows, all parts being equal."""
        length = self.share(total, name)
        return Span(self.rank * length, length)

    def heads(self, total: int, name: str) -> Span:
        """This rank's heads; of fewer heads than ranks, several ranks have the same one."""
        if total < self.size and self.size % total == 0:
            return Span(self.rank * total // self.size, 1)
        return self.span(total, name)

    def rows(self, total: int) -> Span:
        """This rank's part of `total` rows, of which the last rank may have fewer than the others."""
        width = self.widest(total)
        start = self.rank * width
        if start >= total and self.size > 1:
            raise StartError(f"{OPTION}: {total} rows are too few for {self.size} ranks")
        return Span(start, min(width, total - start))

    def widest(self, total: int) -> int:
        """The most of `rows` that a rank has."""
        return -(-total // self.size)

    def add(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """The parts (float32) of all ranks, added in rank order and rounded once."""
        return (part if self.collectives is None else self.collectives.add(part)).to(dtype)

    def gather(self, part: Tensor, total: int) -> Tensor:
        """The parts of `rows` of all ranks side by side, [n, total], on rank 0; elsewhere [n, 0]."""
        if self.collectives is None:
            return part
        missing = self.widest(total) - part.shape[1]
        if missing:
            part = torch.nn.functional.pad(part, (0, missing))
        return self.collectives.gather(part)[:, :total].contiguous()


ALONE = Group()


class Link(Protocol):
    """How a stage reaches its neighbours."""

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to the same rank of the next stage."""

    def receive(self, tensor: Tensor) -> Tensor:
        """What the same rank of the stage before sends, into `tensor`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Some adjacent layers of a model: this stage's number, and how many there are."""

    number: int = 0
    count: int = 1
    link: Link | None = field(default=None, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the final norm and the head."""
        return self.number == self.count - 1

    def layers(self, total: int) -> range:
        """The numbers of its layers.  Raises StartError if there are fewer layers than stages."""
        if total < self.count:
            raise StartError(f"option pipeline_parallel_size: {total} layers are too few for {self.count} stages")
        return range(total * self.number // self.count, total * (self.number + 1) // self.count)


WHOLE = Stage()
