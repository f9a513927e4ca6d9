"""The slots' tables for a device with memory of its own: what changes goes over in one copy a step.

The host's tables stay, as what processors look back in; the device's hold the same, and the newest tokens before the
host knows them.  One slot more than there are requests stands for rows that only fill up a batch of fixed size: it
reads and writes one page that belongs to nobody.  Knows nothing of models or of why a request is scheduled.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokserve import ops
from tokserve.device import Device
from tokserve.layers.batch import ForwardBatch, LogitsRows, Pages
from tokserve.plan import Int32, NewRow, StepPlan
from tokserve.runner.slots import Columns, Int64, Slots, last_tokens


class StagedSlots(Slots):
    """As `Slots`; `padding_block` is the page that belongs to nobody."""

    def __init__(
        self, device: Device, max_num_seqs: int, max_model_len: int, block_size: int, padding_block: int
    ) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        self._device = device
        self._padding = max_num_seqs
        home, rows = device.torch_device, max_num_seqs + 1
        self._device_tokens = torch.zeros(rows, self.tokens.shape[1], dtype=torch.int32, device=home)
        self._device_blocks = torch.full((rows, self.blocks.shape[1]), padding_block, dtype=torch.int32, device=home)
        self._token_edits: list[tuple[int, int, Int32]] = []
        self._block_edits: list[tuple[int, int, Int32]] = []
        self._drawn: tuple[Tensor, Tensor] | None = None  # slots and lengths [n] int64 of this step's new tokens
        self._columns: Columns | None = None  # of the same rows
        self._last: Tensor | None = None  # where their last tokens are in the batch, [n] int64

    def enter(self, row: NewRow) -> None:
        """A request takes the slot."""
        super().enter(row)
        self._token_edits.append((row.slot, 0, row.tokens))

    def extend(self, slot: int, first: int, blocks: list[int]) -> None:
        """Append to the slot's block table, from index `first` on."""
        super().extend(slot, first, blocks)
        self._block_edits.append((slot, first, np.array(blocks, np.int32)))

    def blank(self, rows: int, kv: Pages, *, tokens: int | None = None, adapters: bool = False) -> ForwardBatch:
        """A batch of `rows` rows, with or without adapters, for `build` to fill again and again.

        `tokens`: of all rows together, more than there are rows; None: one each.
        """
        home = self._device.torch_device
        count = rows if tokens is None else tokens
        query_start = torch.arange(rows + 1, dtype=torch.int32, device=home)
        query_start[-1] = count  # the last row has what is left
        return ForwardBatch(
            input_ids=torch.zeros(count, dtype=torch.int64, device=home),
            positions=torch.zeros(count, dtype=torch.int64, device=home),
            query_start=query_start,
            seq_lens=query_start.diff(),
            block_tables=self._device_blocks[self._padding].repeat(rows, 1),
            slot_mapping=torch.full((count,), self._padding_place(), dtype=torch.int64, device=home),
            kv=kv,
            adapters=torch.full((count,), -1, dtype=torch.int32, device=home) if adapters else None,
        )

    def _padding_place(self) -> int:
        return int(self._device_blocks[self._padding, 0]) * self.block_size

    def build(self, plan: StepPlan, kv: Pages, into: ForwardBatch | None = None) -> ForwardBatch:
        """The plan's tokens as one batch; `into`: fill this one, of `blank`, which has room for them.

        Its last row takes the tokens that are missing if it is not the plan's, unless rows have one token each.
        """
        rows = len(plan.slots)
        count = rows if into is None else len(into.seq_lens)
        slots = np.full(count, self._padding, np.int32)
        computed, counts = np.zeros(count, np.int32), np.zeros(count, np.int32)
        slots[:rows], computed[:rows], counts[:rows] = plan.slots, plan.num_computed, plan.num_tokens
        if into is not None and len(into.input_ids) == count:
            counts[rows:] = 1
        elif into is not None:
            counts[-1] += len(into.input_ids) - counts.sum()
        query_start = np.zeros(count + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        drawn = plan.slots[plan.samples]
        adapters = np.full(query_start[-1] if self.has_adapters(plan) else 0, -1, np.int32)
        if len(adapters):
            own = np.repeat(self.adapters[plan.slots], plan.num_tokens)
            adapters[: len(own)] = own
        lengths = (plan.num_computed + plan.num_tokens)[plan.samples].astype(np.int64)
        (
            slots_there, computed_there, starts, drawn_there, lengths_there, seeds, greedy, temperature, self._last,
            token_edits, tokens, block_edits, blocks, adapters_there,
        ) = self._device.put(
            [
                slots, computed, query_start, drawn.astype(np.int64), lengths, self.seeds[drawn], self.greedy[drawn],
                self.temperature[drawn], last_tokens(plan), *_as_edits(self._token_edits),
                *_as_edits(self._block_edits), adapters,
            ]
        )  # fmt: skip
        self._token_edits, self._block_edits = [], []
        ops.edit_rows(self._device_tokens, token_edits, tokens)
        ops.edit_rows(self._device_blocks, block_edits, blocks)
        self._drawn = (drawn_there, lengths_there)
        self._columns = Columns(seeds, lengths_there, greedy, temperature)
        width = -(-int((plan.num_computed + plan.num_tokens).max()) // self.block_size)
        batch = self._empty(int(query_start[-1]), count, width, starts, kv) if into is None else into
        ops.prepare_step(
            self._device_tokens, self._device_blocks, slots_there, computed_there, starts, self.block_size,
            batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens, batch.block_tables,
        )  # fmt: skip
        if into is not None and len(into.input_ids) > count:
            into.query_start.copy_(starts)
        if into is None:
            batch.adapters = adapters_there if len(adapters) else None
        elif into.adapters is not None:
            into.adapters.copy_(adapters_there)
        return batch

    def _empty(self, tokens: int, rows: int, width: int, query_start: Tensor, kv: Pages) -> ForwardBatch:
        home = self._device.torch_device
        return ForwardBatch(
            input_ids=torch.empty(tokens, dtype=torch.int64, device=home),
            positions=torch.empty(tokens, dtype=torch.int64, device=home),
            query_start=query_start,
            seq_lens=torch.empty(rows, dtype=torch.int32, device=home),
            block_tables=torch.empty(rows, width, dtype=torch.int32, device=home),
            slot_mapping=torch.empty(tokens, dtype=torch.int64, device=home),
            kv=kv,
        )

    def columns(self, slots: Int32, lengths: Int64) -> Columns:
        """What went over with the step."""
        assert self._columns is not None and len(self._columns.seeds) == len(slots), "not the rows of this step"
        return self._columns

    def last(self, plan: StepPlan) -> Tensor:
        """What went over with the step."""
        assert self._last is not None
        return self._last

    def ends(self, plan: StepPlan, batch: ForwardBatch) -> LogitsRows | None:
        """Not made here: all tokens go through the last layer."""
        return None

    def keep(self, token_ids: Tensor) -> None:
        """The tokens [n] drawn for the step's rows, in order, are in the device's table for the next step."""
        assert self._drawn is not None
        self._device_tokens.index_put_(self._drawn, token_ids.int())


def _as_edits(edits: list[tuple[int, int, Int32]]) -> tuple[Int32, Int32]:
    """(slot, column, start, count) of each edit [E,4], and the values one after the other."""
    if not edits:
        return np.zeros((0, 4), np.int32), np.zeros(0, np.int32)
    values = [value for _, _, value in edits]
    counts = np.array([len(value) for value in values], np.int32)
    starts = np.cumsum(counts, dtype=np.int32) - counts
    slots, columns = (
        np.array(column, np.int32) for column in zip(*((slot, first) for slot, first, _ in edits), strict=True)
    )
    return np.stack([slots, columns, starts, counts], 1), np.concatenate(values)
