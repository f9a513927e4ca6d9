"""The slots' tables where the device is the host: batches and sampling columns are gathered from them with numpy."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokserve.layers.batch import ForwardBatch, LogitsRows, Pages
from tokserve.protocol.plan import Int32, NewRow, StepPlan
from tokserve.runner.tables.prompt_parts import PromptParts
from tokserve.runner.tables.slots import Int64, SamplingColumns, Slots, last_indices
from tokserve.runner.tables.states import StateColumns, StateTable, blank_columns


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """A batch of some number of tokens to be filled again and again, and its tensors as arrays.  It has as many rows as
    tokens; if some rows have drafts, the last rows have no tokens."""

    batch: ForwardBatch
    query_start: Int32
    input_ids: Int64
    positions: Int64
    seq_lens: Int32
    block_tables: Int32
    slot_mapping: Int64
    adapters: Int32 | None
    states: StateColumns | None = None


class HostSlots(Slots):
    """`Slots` in host memory.  `states`: of the requests in the slots, if the model has recurrent states."""

    states: StateTable | None = None

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        self._count = np.arange(max(max_num_seqs, 1) + 1, dtype=np.int32)
        # the columns of the last rows, most often those of the next as well: seeds, greedy and temperature by slots
        self._last_columns: tuple[bytes, Tensor, Tensor, Tensor] | None = None
        self._parts = PromptParts(self.tokens.shape[1])

    def shifted(self, positions: int) -> HostSlots:
        """The same tables, with each token so many positions earlier: those of a draft head, which has no adapters and
        no recurrent states."""
        tables = copy.copy(self)
        tables.tokens, tables.states, tables._with_adapter = self.tokens[:, positions:], None, set()
        return tables

    def assign(self, row: NewRow) -> None:
        super().assign(row)
        self._last_columns = None
        if self.states is not None:
            self.states.assign(row)
        self._parts.assign(row, self.images)

    def columns(self, slots: Int32, lengths: Int64) -> SamplingColumns:
        """The columns of these rows."""
        key = slots.tobytes()
        if self._last_columns is None or self._last_columns[0] != key:
            seeds, greedy, temperature = self.seeds[slots], self.greedy[slots], self.temperature[slots]
            self._last_columns = (
                key,
                torch.from_numpy(seeds),
                torch.from_numpy(greedy),
                torch.from_numpy(temperature),
            )
        _, seeds_, greedy_, temperature_ = self._last_columns
        return SamplingColumns(seeds_, torch.from_numpy(lengths), greedy_, temperature_)

    def build(self, plan: StepPlan, kv: Pages) -> ForwardBatch:
        slots, computed, counts = plan.slots, plan.num_computed, plan.num_tokens
        rows = len(slots)
        if np.count_nonzero(counts == 1) == rows:  # decode only
            query_start = self._count[: rows + 1].copy()
            owner, positions = slots, computed.astype(np.int64)
        else:
            query_start = np.zeros(rows + 1, np.int32)
            np.add.accumulate(counts, out=query_start[1:])
            owner = slots.repeat(counts)
            positions = np.arange(query_start[-1], dtype=np.int64) + (computed - query_start[:-1]).repeat(counts)
        seq_lens = computed + counts
        pages, offsets = np.divmod(positions, self.block_size)
        width = -(-int(seq_lens.max()) // self.block_size)
        divided = self._parts.divided(plan)
        tables = slots
        if divided is not None:
            query_start = np.zeros(len(divided.counts) + 1, np.int32)
            np.add.accumulate(divided.counts, out=query_start[1:])
            seq_lens, tables = divided.ends, slots[divided.owners]
        rope, axes = self._parts.rope_positions(slots, computed, counts, positions)
        types = self._parts.types(slots, counts, positions)
        return ForwardBatch(
            input_ids=torch.from_numpy(self.tokens[owner, positions].astype(np.int64)),  # [T]
            positions=torch.from_numpy(rope),  # [T]
            query_start=torch.from_numpy(query_start),  # [R + 1]
            seq_lens=torch.from_numpy(seq_lens),  # [R]
            block_tables=torch.from_numpy(self.blocks[tables, :width]),  # [R, width]
            slot_mapping=torch.from_numpy(self.blocks[owner, pages] * np.int64(self.block_size) + offsets),  # [T]
            kv=kv,
            adapters=torch.from_numpy(self.adapters[owner]) if self.has_adapters(plan) else None,  # [T]
            states=None if self.states is None else self.states.rows(),
            axes=None if axes is None else torch.from_numpy(axes),
            bidirectional=None if divided is None else torch.from_numpy(divided.bidirectional),
            token_types=None if types is None else torch.from_numpy(types),  # [T]
        )

    def decode_batch(self, num_tokens: int, kv: Pages, *, adapters: bool = False) -> DecodeBatch:
        """A batch of so many tokens of decode rows, with or without adapters, for `fill`."""
        rows = num_tokens
        batch = ForwardBatch(
            input_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.zeros(rows, dtype=torch.int64),
            query_start=torch.arange(rows + 1, dtype=torch.int32),
            seq_lens=torch.zeros(rows, dtype=torch.int32),
            block_tables=torch.zeros(rows, self.blocks.shape[1], dtype=torch.int32),
            slot_mapping=torch.zeros(rows, dtype=torch.int64),
            kv=kv,
            adapters=torch.full((rows,), -1, dtype=torch.int32) if adapters else None,
        )
        states = None
        if self.states is not None:
            states, batch.states = blank_columns(rows)
        return DecodeBatch(
            batch,
            batch.query_start.numpy(),
            batch.input_ids.numpy(),
            batch.positions.numpy(),
            batch.seq_lens.numpy(),
            batch.block_tables.numpy(),
            batch.slot_mapping.numpy(),
            None if batch.adapters is None else batch.adapters.numpy(),
            states,
        )

    def fill(self, plan: StepPlan, into: DecodeBatch) -> None:
        """Put the rows of a decode plan into a batch of as many tokens."""
        if self.states is not None and into.states is not None:
            self.states.fill(into.states)
        if len(plan.draft_token_ids):
            return self._fill_with_drafts(plan, into)
        slots, positions = plan.slots, plan.num_computed
        np.copyto(into.query_start, self._count[: len(slots) + 1])
        pages, offsets = np.divmod(positions, self.block_size)
        np.add(positions, 1, out=into.seq_lens)
        width = int(np.maximum.reduce(pages)) + 1
        into.positions[:] = positions
        if self._parts.has_axes:
            counts, indices = plan.num_tokens, positions.astype(np.int64)
            into.positions[:] = self._parts.rope_positions(slots, positions, counts, indices)[0]
        into.input_ids[:] = self.tokens[slots, positions]
        into.block_tables[:, :width] = self.blocks[slots, :width]
        np.multiply(self.blocks[slots, pages], self.block_size, out=into.slot_mapping, dtype=np.int64)
        np.add(into.slot_mapping, offsets, out=into.slot_mapping)
        if into.adapters is not None:
            into.adapters[:] = self.adapters[slots]

    def _fill_with_drafts(self, plan: StepPlan, into: DecodeBatch) -> None:
        rows, counts = len(plan.slots), plan.num_tokens
        owner = plan.slots.repeat(counts)
        positions = last_indices(plan.num_computed + counts, counts)
        pages, offsets = np.divmod(positions, self.block_size)
        width = int(np.maximum.reduce(pages)) + 1
        np.add.accumulate(counts, out=into.query_start[1 : rows + 1])
        into.query_start[rows + 1 :] = into.query_start[rows]
        np.add(plan.num_computed, counts, out=into.seq_lens[:rows])
        into.block_tables[:rows, :width] = self.blocks[plan.slots, :width]
        into.positions[:] = self._parts.rope_positions(plan.slots, plan.num_computed, counts, positions)[0]
        into.input_ids[:] = self.tokens[owner, positions]
        into.slot_mapping[:] = self.blocks[owner, pages] * np.int64(self.block_size) + offsets
        if into.adapters is not None:
            into.adapters[:] = self.adapters[owner]

    def logits_rows(self, plan: StepPlan, batch: ForwardBatch, counts: Int32) -> LogitsRows | None:
        """The last counts[i] tokens of each row; None if these are all of the batch."""
        if np.add.reduce(counts) == len(batch.input_ids):
            return None
        divided = None if batch.bidirectional is None else self._parts.divided(plan)
        row_counts = counts if divided is None else divided.last(counts)
        rows = row_counts.nonzero()[0]  # [R']
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.add.accumulate(row_counts[rows], out=query_start[1:])
        index = torch.from_numpy(rows)
        return LogitsRows(
            torch.from_numpy(last_indices(np.add.accumulate(plan.num_tokens, dtype=np.int64), counts)),
            torch.from_numpy(query_start),
            batch.seq_lens.index_select(0, index),
            batch.block_tables.index_select(0, index),
            None if batch.adapters is None else torch.from_numpy(self.adapters[plan.slots].repeat(counts)),
            None if batch.bidirectional is None else batch.bidirectional.index_select(0, index),
        )
