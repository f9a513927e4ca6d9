"""Rows of logits before sampling: the requests and positions that they belong to, and the buffer processors edit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.protocol.plan import Int32
from tokserve.runner.tables.slots import Int64

ToDevice = Callable[[NDArray[Any]], Tensor]


@dataclass(slots=True)
class LogitRows:
    """The slot of each row of logits, and the index of the token that the row predicts.

    `lengths`: tokens before the predicted one, which is its index; the first `prompt_lens` of them count as prompt.
    `sampling` False: the tokens are prompt tokens to be scored, with all before them counted as prompt.
    `has_grammar` False: grammars do not count, as in drafts.
    """

    slots: Int32  # [n]
    lengths: Int64  # [n]
    prompt_lens: Int64  # [n]
    sampling: bool = True
    has_grammar: bool = True

    def take(self, index: Int64) -> LogitRows:
        """These rows only."""
        return LogitRows(
            self.slots[index], self.lengths[index], self.prompt_lens[index], self.sampling, self.has_grammar
        )


class LogitsBuffer:
    """Logits while processors change them.  The model's own are never written to: the first edit copies them."""

    def __init__(self, logits: Tensor, buffer: Tensor, tensor: ToDevice = torch.from_numpy) -> None:
        self._source = logits
        self.buffer = buffer  # [n, V]
        self.tensor = tensor  # puts an array on the device of the logits
        self.logits = logits  # [n, V]

    def editable(self) -> Tensor:
        if self.logits is self._source:
            self.logits = self.buffer.copy_(self._source)
        return self.logits

    def flat(self) -> Tensor:
        """The logits as one row [n * V], to be edited in place."""
        return self.editable().view(-1)

    def flat_indices(self, index: Int64, ids: list[Int64]) -> Tensor:
        """Indices in `flat` of ids[0] of row index[0], ids[1] of row index[1], ..."""
        starts = np.repeat(index * self.logits.shape[1], [len(row_ids) for row_ids in ids])
        return self.tensor(starts + np.concatenate(ids))

    def forbid(self, indices: Tensor, forbidden: Tensor) -> None:
        """-inf at those of the `indices` in `flat` [m] int64 that are `forbidden` [m] bool; an index may come again."""
        values = torch.where(forbidden, float("-inf"), float("inf"))
        self.flat().scatter_reduce_(0, indices, values, "amin")

    def rows(self, index: Int64) -> Tensor:
        """These rows."""
        if index.size == self.logits.shape[0]:
            return self.logits
        return self.logits.index_select(0, self.tensor(index))

    def set_rows(self, index: Int64, rows: Tensor) -> None:
        """Replace these rows."""
        if index.size == self.logits.shape[0]:
            self.logits = rows
        else:
            self.editable().index_copy_(0, self.tensor(index), rows)
