"""The processors in their order, which is the specification of what a token is sampled from.

bias -> allowed and bad ids -> bad sequences -> repeated n-grams -> min_tokens -> budget of reasoning -> forced tokens
-> grammar -> penalties -> (extreme rows: shift by the maximum) -> temperature -> top-k, top-p, min-p.  A batch in which
no row needs a processor is not even copied.  What a row becomes depends on its own slot and history alone, never on the
other rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import GrammarBitmask, NewRow
from tokserve.runner.logits import LogitRows, LogitsBuffer, ToDevice
from tokserve.runner.processors import (
    BadSequences,
    Bias,
    Filter,
    ForcedTokens,
    GrammarMask,
    MinTokens,
    NoRepeatNgrams,
    Penalties,
    Processor,
    ShiftByMax,
    Temperature,
    ThinkingBudget,
    TokenIds,
)
from tokserve.runner.tables.slots import Int64, Slots


class Pipeline:
    """The processors, and which of them each slot needs.  `tensor` puts an array on the device of the logits."""

    def __init__(self, slots: Slots, vocab_size: int, tensor: ToDevice = torch.from_numpy) -> None:
        temperature, filters = Temperature(slots), Filter(slots, vocab_size)
        self.filters = filters
        self._tensor = tensor
        self._grammar = GrammarMask(vocab_size)
        self.processors: list[Processor] = [
            Bias(vocab_size),
            TokenIds(vocab_size),
            BadSequences(slots, vocab_size),
            NoRepeatNgrams(slots, vocab_size),
            MinTokens(slots, vocab_size),
            ThinkingBudget(slots),
            ForcedTokens(),
            self._grammar,
            Penalties(slots),
            ShiftByMax(),
            temperature,
            filters,
        ]
        self.temperature_bit = 1 << self.processors.index(temperature)
        self.column_bits = self.temperature_bit | 1 << self.processors.index(filters)  # all they need is in columns
        self._needs: Int64 = np.zeros(len(slots.seeds), np.int64)  # bit i: processor i
        self._with_needs: set[int] = set()  # slots that need any
        self._buffer = torch.empty(0, vocab_size)  # kept: fresh pages would cost more than the work on them

    def assign(self, row: NewRow, params: SamplingParams) -> None:
        self.release(row.slot)
        needs = sum(1 << i for i, step in enumerate(self.processors) if step.assign(row, params))
        if needs:
            self._needs[row.slot] = needs
            self._with_needs.add(row.slot)

    def release(self, slot: int) -> None:
        self._needs[slot] = 0
        self._with_needs.discard(slot)

    def set_bitmask(self, bitmask: GrammarBitmask | None) -> None:
        """What the rows with a grammar may sample in this step."""
        self._grammar.bitmask = bitmask

    def needs(self, rows: LogitRows) -> int:
        """Bit i: some row needs processor i; 0 if all rows are sampled from as they are."""
        return int(np.bitwise_or.reduce(self._needs[rows.slots])) if self._with_needs else 0

    def run(self, logits: Tensor, rows: LogitRows) -> tuple[Tensor, Tensor | None]:
        """Processed logits [n, V], good until the next call (`logits` itself if no row needs anything), and
        which rows still have a token to sample, bool [n] (None: all).
        """
        union = self.needs(rows)
        if union == 0:
            return logits, None
        needs = self._needs[rows.slots]
        if self._buffer.shape[0] < logits.shape[0]:
            self._buffer = torch.empty_like(logits)
        buffer, masked = LogitsBuffer(logits, self._buffer[: logits.shape[0]], self._tensor), False
        for i, step in enumerate(self.processors):
            if union >> i & 1:
                index = step.active_rows(rows, np.flatnonzero(needs >> i & 1))
                if index.size:
                    step.apply(buffer, rows, index)
                    masked |= step.masks
        return buffer.logits, buffer.logits.amax(1).isfinite() if masked else None
