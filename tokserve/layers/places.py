"""Where the elements of a checkpoint's tensor lie in memory, so that some of them can be read and replaced.

Packing is a permutation where nothing is quantized: what a tensor was, in the dtype in which it is kept, is still
there.  Elements are counted in the tensor's row-major order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve import ops
from tokserve.layers.parallel import Span

Indices = NDArray[Any]


class Place(Protocol):
    """`memory`: flat, with the elements and others."""

    @property
    def memory(self) -> Tensor: ...

    def positions(self, indices: Indices) -> Indices:
        """Where in `memory` elements are."""

    def read(self, first: int, last: int) -> Tensor:
        """Rows first .. last - 1 of the tensor; of a vector, elements."""

    def stored(self, values: Tensor) -> Tensor:
        """What is written in place of `values`."""


@dataclass(frozen=True, slots=True)
class VectorPlace:
    """A vector of its own; `offset` is added to what is written, so only without one it can be read."""

    memory: Tensor
    offset: float = 0.0

    def positions(self, indices: Indices) -> Indices:
        return indices

    def read(self, first: int, last: int) -> Tensor:
        return self.memory[first:last]

    def stored(self, values: Tensor) -> Tensor:
        return (values.float() + self.offset if self.offset else values).to(self.memory.dtype)


@dataclass(frozen=True, slots=True)
class TransposedPlace:
    """A matrix whose columns in memory are the tensor's rows."""

    matrix: Tensor

    @property
    def memory(self) -> Tensor:
        return self.matrix.view(-1)

    def positions(self, indices: Indices) -> Indices:
        columns, rows = self.matrix.shape
        row, column = np.divmod(indices.astype(np.int64, copy=False), columns)
        return np.asarray(column * rows + row)

    def read(self, first: int, last: int) -> Tensor:
        return self.matrix[:, first:last].t().contiguous()

    def stored(self, values: Tensor) -> Tensor:
        return values.to(self.memory.dtype)


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """Some rows of a packed weight, from `start` on."""

    packed: ops.PackedWeight
    start: int = 0

    @property
    def memory(self) -> Tensor:
        return self.packed.packed.view(-1)

    def positions(self, indices: Indices) -> Indices:
        elements = torch.from_numpy(indices.astype(np.int64, copy=False))
        return ops.packed_positions(self.packed, self.start, elements).numpy()

    def read(self, first: int, last: int) -> Tensor:
        return self.packed.unpacked(self.start + first, self.start + last)

    def stored(self, values: Tensor) -> Tensor:
        return values.to(self.memory.dtype)


@dataclass(frozen=True, slots=True)
class TransposedMatrixPlace:
    """Columns of a tensor that is the transpose of `rows` rows of a packed weight."""

    matrix: MatrixPlace
    rows: int

    @property
    def memory(self) -> Tensor:
        return self.matrix.memory

    def positions(self, indices: Indices) -> Indices:
        column, row = np.divmod(indices.astype(np.int64, copy=False), self.rows)
        return self.matrix.positions(row * self.matrix.packed.columns + column)

    def read(self, first: int, last: int) -> Tensor:
        indices = self.positions(np.arange(first * self.rows, last * self.rows))
        values = self.memory[torch.from_numpy(indices.astype(np.int64)).to(self.memory.device)]
        return values.view(last - first, self.rows).to(self.matrix.packed.dtype)

    def stored(self, values: Tensor) -> Tensor:
        return self.matrix.stored(values)


@dataclass(frozen=True, slots=True)
class RowsPlace:
    """A tensor whose first elements, `before` of them, come first in `memory`, and whose other rows are packed from
    `start` on."""

    memory: Tensor
    packed: ops.PackedWeight
    before: int
    start: int

    def positions(self, indices: Indices) -> Indices:
        indices = indices.astype(np.int64, copy=False)
        elements = torch.from_numpy(np.maximum(indices - self.before, 0))
        packed = ops.packed_positions(self.packed, 0, elements).numpy()
        return np.where(indices < self.before, indices, packed + self.start)

    def read(self, first: int, last: int) -> Tensor:
        columns = self.packed.columns
        rows = self.before // columns
        parts = [self.memory[: self.before].view(rows, columns)[first:last].to(self.packed.dtype)]
        if last > rows:
            parts.append(self.packed.unpacked(max(first - rows, 0), last - rows))
        return torch.cat(parts)

    def stored(self, values: Tensor) -> Tensor:
        return values.to(self.memory.dtype)


class TensorPart(NamedTuple):
    """What a rank has of a tensor: some of its rows (`dim` 0) or columns (1), one after the other."""

    dim: int
    spans: Sequence[Span]

    def meets(self, first: int, last: int) -> bool:
        """Whether it has elements of rows first .. last - 1."""
        if self.dim:
            return bool(self.spans)
        return any(start < last and first < start + length for start, length in self.spans)

    def local(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Indices, Indices]:
        """Which of the elements of a tensor of `shape` are here, and their numbers among those that are."""
        row, column = np.divmod(indices.astype(np.int64, copy=False), int(np.prod(shape[1:])))
        line = column if self.dim else row
        number, taken = np.full(len(indices), -1), 0
        for start, length in self.spans:
            inside = (line >= start) & (line < start + length)
            number[inside] = line[inside] - start + taken
            taken += length
        present = np.flatnonzero(number >= 0)
        if self.dim:
            return present, row[present] * taken + number[present]
        return present, number[present] * int(np.prod(shape[1:])) + column[present]

    def taken(self, tensor: Tensor) -> Tensor:
        """What is here of a whole tensor."""
        return torch.cat([tensor.narrow(self.dim, *span) for span in self.spans], self.dim)

    def spread(self, read: Callable[[int, int], Tensor], first: int, rows: Tensor) -> Tensor:
        """`rows`, zeros, are those of the tensor from `first` on: fill in what is here; `read` takes rows from it."""
        elements = read(first, first + len(rows)) if self.dim else rows
        taken = 0
        for start, length in self.spans:
            low, high = max(first, start), min(first + len(rows), start + length)
            if self.dim:
                rows[:, start : start + length] = elements[:, taken : taken + length]
            elif low < high:
                rows[low - first : high - first] = read(taken + low - start, taken + high - start)
            taken += length
        return rows

    def transposed(self) -> TensorPart:
        """The same of the transpose."""
        return TensorPart(1 - self.dim, self.spans) if self.spans else self


NOWHERE = TensorPart(0, ())


def gather(place: Place, positions: Indices, dtype: torch.dtype) -> Tensor:
    """Elements as `dtype`, in host memory."""
    memory = place.memory
    if not memory.is_cpu:
        return memory[torch.from_numpy(positions.astype(np.int64)).to(memory.device)].to("cpu", dtype)
    taken = _words(memory).take(positions)
    return torch.from_numpy(taken).view(memory.dtype).to(dtype)


def scatter(place: Place, positions: Indices, values: Tensor) -> None:
    """Replace the elements at these positions of a place."""
    memory, stored = place.memory, place.stored(values)
    if not memory.is_cpu:
        memory[torch.from_numpy(positions.astype(np.int64)).to(memory.device)] = stored.to(memory.device)
    else:
        _words(memory)[positions] = _words(stored)


def _words(tensor: Tensor) -> NDArray[Any]:
    """The elements as integers of their size; a view."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).numpy()
