"""Columns that the device computes for sampled tokens, besides logprobs: each by a source of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokserve.base.rooms import imported
from tokserve.protocol.column_table import column_specs
from tokserve.protocol.columns import ColumnRows
from tokserve.protocol.plan import NewRow

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledLogits:
    """What n tokens were sampled from.  `logits` [n, V]: the model's; `processed` [n, V]: after the processors;
    `token_ids` [n] int64, `greedy` [n] bool, `temperature` [n]."""

    logits: Tensor
    processed: Tensor
    token_ids: Tensor
    greedy: Tensor
    temperature: Tensor

    def take(self, index: Tensor) -> SampledLogits:
        """The rows of this index [m]."""
        columns = (self.logits, self.processed, self.token_ids, self.greedy, self.temperature)
        return SampledLogits(*(column.index_select(0, index) for column in columns))


class TokenSource(Protocol):
    """Computes the records of one column.  It is made with the limit of `ModelConfig.max_sampling_mask`."""

    num_arrays: int  # that `compute` returns

    def compute(self, sampled: SampledLogits) -> Sequence[Tensor]:
        """Values of the tokens that asked for the column, on the device."""

    def rows(self, arrays: Sequence[NDArray[Any]], count: int, index: Int64) -> ColumnRows:
        """The column of `count` tokens, of which those at `index` [m] asked for it, from the values on the host."""


class Columns:
    """The sources of all declared columns, and which slots ask for which of them."""

    def __init__(self, max_num_seqs: int, max_items: int) -> None:
        specs = [spec for spec in column_specs().values() if spec.source]
        self._sources: dict[str, TokenSource] = {spec.name: imported(spec.source)(max_items) for spec in specs}
        self._asks = {name: np.zeros(max_num_seqs, np.bool_) for name in self._sources}
        self._slots: dict[int, tuple[str, ...]] = {}  # that ask for any, with the names

    def assign(self, row: NewRow) -> None:
        """A request takes a slot."""
        names = tuple([name for name in row.columns if name in self._sources])
        for name in names:
            self._asks[name][row.slot] = True
        if names:
            self._slots[row.slot] = names

    def release(self, slot: int) -> None:
        for name in self._slots.pop(slot, ()):
            self._asks[name][slot] = False

    def asked(self, slots: NDArray[np.int32]) -> dict[str, Int64]:
        """The rows whose slots ask for a column, by its name; only columns that a row asks for."""
        if not self._slots:
            return {}
        indexes = {name: np.flatnonzero(asks[slots]) for name, asks in self._asks.items()}
        return {name: index for name, index in indexes.items() if len(index)}

    def source(self, name: str) -> TokenSource:
        """The source of a column."""
        return self._sources[name]
