"""The slots' tables on a device with memory of its own: what changes is copied over in one transfer a step.

The host's tables stay; the device's hold the same, and sampled tokens before the host knows them, so processors read
these.  One slot more than there are requests stands for rows that only fill up a batch of fixed size: it
reads and writes one page that belongs to no request.

A recorded decode step keeps its rows on the device and moves them on by a token each time it runs: as long as the plans
have these rows, nothing is copied over but new blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve import ops
from tokserve.layers.batch import ForwardBatch, LogitsRows, Pages, StateRows
from tokserve.protocol.plan import Int32, NewRow, StepPlan
from tokserve.runner.device import Accelerator
from tokserve.runner.tables.prompt_parts import PromptParts
from tokserve.runner.tables.slots import Int64, SamplingColumns, Slots, last_indices, logit_lengths
from tokserve.runner.tables.states import PAIR, StateTable

FEWER = 8  # times fewer tokens than a batch has are worth launches of their own for them
CAPTURED_SAVES = 4  # snapshots of states that a captured step can take: each is looked for by every row


@dataclass(slots=True)
class DecodeRows:
    """The rows of a recorded decode step on the device, and what the host knows of them."""

    batch: ForwardBatch
    slots: Tensor  # [R] int32
    computed: Tensor  # [R] int32, tokens before the step's, once it has run
    lengths: Tensor  # [R] int64, and with the step's
    last: tuple[Int32, Int32, Int64] | None = None  # of the last plan: slots, num_computed, generation of the slots
    columns: SamplingColumns | None = None
    logits_indices: Tensor | None = None
    saves: bool = False  # whether the last step took snapshots
    ahead: int = 0  # as of a `Draft`

    def are_next(self, plan: StepPlan, generation: Int64) -> bool:
        """Whether the plan has the rows of the last one, a token further."""
        if self.last is None or len(plan.slots) != len(self.last[0]):
            return False
        slots, computed, before = self.last
        return bool(
            (plan.slots == slots).all() and (plan.num_computed == computed + 1).all() and (generation == before).all()
        )


class DeviceSlots(Slots):
    """`Slots` on the device; `padding_block` is the page that belongs to no request.  `states`: of the requests in the
    slots, if the model has recurrent states."""

    states: StateTable | None = None

    def __init__(
        self, device: Accelerator, max_num_seqs: int, max_model_len: int, block_size: int, padding_block: int
    ) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        self._device = device
        self._padding_slot = max_num_seqs
        torch_device, rows = device.torch_device, max_num_seqs + 1
        self._device_tokens = torch.zeros(rows, self.tokens.shape[1], dtype=torch.int32, device=torch_device)
        self._device_blocks = torch.full(
            (rows, self.blocks.shape[1]), padding_block, dtype=torch.int32, device=torch_device
        )
        self._padding_index = padding_block * block_size  # in the slot mapping
        self._token_edits: list[tuple[int, int, Int32]] = []
        self._block_edits: list[tuple[int, int, Int32]] = []
        self._parts = PromptParts(self.tokens.shape[1])
        self._columns: SamplingColumns | None = None  # of this step's rows of logits
        self.logits_indices: Tensor | None = None  # [n] int64, their tokens in this step's batch

    def assign(self, row: NewRow) -> None:
        super().assign(row)
        self._parts.assign(row, self.images)
        if self.states is not None:
            self.states.assign(row)
        self._token_edits.append((row.slot, 0, row.tokens))

    def extend(self, slot: int, first: int, blocks: list[int]) -> None:
        super().extend(slot, first, blocks)
        self._block_edits.append((slot, first, np.array(blocks, np.int32)))

    def write(self, slots: Int32, positions: Int64, token_ids: Int32) -> None:
        super().write(slots, positions, token_ids)
        singles = np.split(token_ids, len(token_ids))
        self._token_edits += zip(slots.tolist(), positions.tolist(), singles, strict=True)

    def history(self, slots: Int32, width: int) -> Tensor:
        """The tokens in the device's table, which has sampled tokens before the host does."""
        (rows,) = self._device.put([slots.astype(np.int64)])
        return self._device_tokens[:, :width].index_select(0, rows)

    def write_drafts(self, plan: StepPlan) -> None:
        super().write_drafts(plan)
        rows = np.flatnonzero(plan.num_drafts)
        counts = plan.num_drafts[rows]
        starts = plan.num_computed[rows] + plan.num_tokens[rows] - counts
        drafts = np.split(plan.draft_token_ids, np.cumsum(counts)[:-1])
        self._token_edits += zip(plan.slots[rows].tolist(), starts.tolist(), drafts, strict=True)

    def empty_batch(
        self, rows: int, kv: Pages, *, tokens: int | None = None, adapters: bool = False, ahead: int = 0
    ) -> ForwardBatch:
        """A batch of `rows` rows, with or without adapters, for `build` to fill again and again.  `tokens`: of all rows
        together, more than there are rows; None: one each.  `ahead`: as of a `Draft`."""
        torch_device = self._device.torch_device
        count = rows if tokens is None else tokens
        query_start = torch.arange(rows + 1, dtype=torch.int32, device=torch_device)
        query_start[-1] = count  # the last row has the rest
        batch = self._unfilled(count, rows, self._device_blocks.shape[1], query_start, kv)
        batch.input_ids.zero_()
        batch.positions.zero_()
        batch.seq_lens.copy_(query_start.diff())
        batch.block_tables.copy_(self._device_blocks[self._padding_slot])
        batch.slot_mapping.fill_(self._padding_index)
        if adapters:
            batch.adapters = torch.full((count,), -1, dtype=torch.int32, device=torch_device)
        if self.states is not None and not ahead:
            columns = self._state_columns(rows, CAPTURED_SAVES, no_rows=True)
            batch.states = StateRows(*(torch.from_numpy(column).to(torch_device) for column in columns))
        return batch

    def _state_columns(self, rows: int, saves: int, *, no_rows: bool = False) -> list[Int32 | Int64]:
        """The columns of the step's states, for so many rows and snapshots: those beyond the step's have none.
        `no_rows`: all have none."""
        assert self.states is not None
        step = self.states.step
        count, taken = (0, 0) if no_rows else (len(step.rows), len(step.saves))
        state_rows, start, end = np.full(rows, -1, np.int64), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        places = np.full((saves, PAIR), -1, np.int32)
        state_rows[:count], start[:count], end[:count] = step.rows[:count], step.start[:count], step.end[:count]
        places[:taken] = step.saves[:taken]
        return [state_rows, start, end, places]

    def build(self, plan: StepPlan, kv: Pages, into: ForwardBatch | None = None, *, ahead: int = 0) -> ForwardBatch:
        """The plan's tokens as one batch; `into`: fill this one, of `empty_batch`, which has room for them.  Its last
        row takes the tokens that are missing if it is not the plan's, unless rows have one token each.  `ahead`: as
        of a `Draft`."""
        slots, computed, query_start = self._padded_rows(plan, into)
        adapters = self._row_adapters(plan, 0 if ahead else int(query_start[-1]))
        arrays: list[Int32 | Int64] = [slots, computed, query_start, adapters]
        if self.states is not None and not ahead:
            saves = len(self.states.step.saves) if into is None else CAPTURED_SAVES
            arrays += self._state_columns(len(slots), saves)
        slots_dev, computed_dev, starts, adapters_dev, *states = self._put(plan, arrays, ahead)
        width = -(-int((plan.num_computed + plan.num_tokens).max()) // self.block_size)
        batch = self._unfilled(int(query_start[-1]), len(slots), width, starts, kv) if into is None else into
        ops.prepare_step(
            self._device_tokens[:, ahead:],
            self._device_blocks,
            slots_dev,
            computed_dev,
            starts,
            self.block_size,
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.seq_lens,
            batch.block_tables,
        )
        if into is not None and len(into.input_ids) > len(slots):
            into.query_start.copy_(starts)
        if into is None and self._parts.are_in(plan):
            self._put_parts(plan, batch)
        if into is None:
            batch.states = StateRows(*states) if states else None
        elif into.states is not None:
            _fill_states(into.states, states)
        if into is None:
            batch.adapters = adapters_dev if len(adapters) else None
        elif into.adapters is not None:
            into.adapters.copy_(adapters_dev)
        return batch

    def logits_rows(self, plan: StepPlan, batch: ForwardBatch) -> LogitsRows | None:
        """The tokens of the plan's logits in the batch that was built last; None if there are none, or not much fewer
        than all tokens, or rows of the batch are divided."""
        counts, total = plan.num_logits, len(batch.input_ids)
        if batch.bidirectional is not None or not 0 < FEWER * int(counts.sum()) <= total:
            return None
        assert self.logits_indices is not None
        query_start = np.zeros(np.count_nonzero(counts) + 1, np.int32)
        np.add.accumulate(counts[counts > 0], out=query_start[1:])
        starts, rows = self._device.put([query_start, np.flatnonzero(counts)])
        return LogitsRows(
            self.logits_indices,
            starts,
            batch.seq_lens.index_select(0, rows),
            batch.block_tables.index_select(0, rows),
            None if batch.adapters is None else batch.adapters.index_select(0, self.logits_indices),
        )

    def fits_graphs(self, plan: StepPlan) -> bool:
        """Whether a captured step can be that of the plan: its rows have no images or second texts that matter to it,
        and it takes few snapshots of states."""
        return not self._parts.are_in(plan) and (self.states is None or len(self.states.step.saves) <= CAPTURED_SAVES)

    def _put_parts(self, plan: StepPlan, batch: ForwardBatch) -> None:
        """What images and second texts change in the plan's batch."""
        slots, computed, counts = plan.slots, plan.num_computed, plan.num_tokens
        positions = last_indices(np.add(computed, counts, dtype=np.int64), counts)
        rope, axes = self._parts.rope_positions(slots, computed, counts, positions)
        types, divided = self._parts.types(slots, counts, positions), self._parts.divided(plan)
        arrays: list[NDArray[Any]] = [rope]
        arrays += [] if axes is None else [axes.reshape(-1)]
        arrays += [] if types is None else [types]
        if divided is not None:
            starts = np.zeros(len(divided.counts) + 1, np.int32)
            np.add.accumulate(divided.counts, out=starts[1:])
            arrays += [starts, divided.ends, divided.owners, divided.bidirectional]
        batch.positions, *copies = self._device.put(arrays)
        if axes is not None:
            batch.axes = copies.pop(0).view(3, -1)
        if types is not None:
            batch.token_types = copies.pop(0)
        if divided is not None:
            batch.query_start, batch.seq_lens, owners, batch.bidirectional = copies
            batch.block_tables = batch.block_tables.index_select(0, owners)

    def decode_rows(self, rows: int, kv: Pages, *, adapters: bool, ahead: int = 0) -> DecodeRows:
        """Rows of a step to be recorded, which begins with `advance`; they are padding until `resume`.  `ahead`: as
        of a `Draft`."""
        torch_device = self._device.torch_device
        slots = torch.full((rows,), self._padding_slot, dtype=torch.int32, device=torch_device)
        lengths = torch.ones(rows, dtype=torch.int64, device=torch_device)
        batch = self.empty_batch(rows, kv, adapters=adapters, ahead=ahead)
        return DecodeRows(batch, slots, torch.zeros_like(slots), lengths, ahead=ahead)

    def advance(self, rows: DecodeRows) -> None:
        """Move the rows on by a token, and fill in their batch: work of the device alone."""
        batch = rows.batch
        ops.advance_step(
            self._device_tokens[:, rows.ahead :],
            self._device_blocks,
            rows.slots,
            rows.computed,
            self.block_size,
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            rows.lengths,
            batch.seq_lens,
            batch.block_tables,
        )
        if rows.ahead:
            rows.lengths.add_(rows.ahead)
        if batch.states is not None:
            batch.states.start.copy_(batch.states.end)
            batch.states.end.copy_(batch.seq_lens)

    def resume(self, plan: StepPlan, rows: DecodeRows) -> None:
        """Let the next run of the step that has these rows be that of a plan of one token a row."""
        generation = self.generation(plan.slots)
        if rows.are_next(plan, generation) and self._states_are_next(plan, rows):
            if self._token_edits or self._block_edits:
                self._edit(*self._device.put(self._edits()))
        else:
            slots, computed, _ = self._padded_rows(plan, rows.batch)
            adapters = self._row_adapters(plan, 0 if rows.ahead else len(slots))
            states = [] if rows.batch.states is None else self._state_columns(len(slots), CAPTURED_SAVES)
            arrays = [slots, computed - 1, adapters, *states]
            slots_dev, computed_dev, adapters_dev, *columns = self._put(plan, arrays, rows.ahead)
            if rows.batch.states is not None:
                state_rows, start, _, saves = columns
                # `advance` begins where the step before has ended
                _fill_states(rows.batch.states, (state_rows, start, start, saves))
                rows.saves = bool(self.states and len(self.states.step.saves))
            rows.slots.copy_(slots_dev)
            rows.computed.copy_(computed_dev)
            if rows.batch.adapters is not None:
                rows.batch.adapters.copy_(adapters_dev)
            assert self._columns is not None
            rows.columns = replace(self._columns, lengths=rows.lengths[: len(plan.slots)])
            rows.logits_indices = self.logits_indices
        rows.last = plan.slots.copy(), plan.num_computed.copy(), generation
        self._columns, self.logits_indices = rows.columns, rows.logits_indices

    def _states_are_next(self, plan: StepPlan, rows: DecodeRows) -> bool:
        """Whether the states of a step's rows are those that its last run has left, and no snapshot is taken."""
        if self.states is None or rows.batch.states is None:
            return True
        step = self.states.step
        return not rows.saves and not len(step.saves) and bool((step.start == plan.num_computed).all())

    def _put(self, plan: StepPlan, arrays: Sequence[Int32 | Int64], ahead: int = 0) -> list[Tensor]:
        """Copy these over, with the columns of the plan's rows of logits and what has changed in the tables."""
        sampled, lengths = logit_lengths(plan)
        logits_indices = last_indices(np.cumsum(plan.num_tokens, dtype=np.int64), plan.num_logits)
        columns = [
            self.seeds[sampled],
            lengths + ahead,
            self.greedy[sampled],
            self.temperature[sampled],
            sampled.astype(np.int64),
            self.top_k[sampled],
            self.top_p[sampled],
            self.min_p[sampled],
            logits_indices,
        ]
        count = len(arrays)
        copies = self._device.put([*arrays, *columns, *self._edits()])
        seeds, lengths_dev, greedy, temperature, slots, *filters, self.logits_indices = copies[count:-4]
        self._columns = SamplingColumns(seeds, lengths_dev, greedy, temperature, slots, tuple(filters))
        self._edit(*copies[-4:])
        return copies[:count]

    def _edits(self) -> list[Int32]:
        """What has changed in the tables of tokens and blocks since the last call, for `_edit`."""
        edits = [*_as_edits(self._token_edits), *_as_edits(self._block_edits)]
        self._token_edits, self._block_edits = [], []
        return edits

    def _edit(self, token_edits: Tensor, tokens: Tensor, block_edits: Tensor, blocks: Tensor) -> None:
        ops.edit_rows(self._device_tokens, token_edits, tokens)
        ops.edit_rows(self._device_blocks, block_edits, blocks)

    def _row_adapters(self, plan: StepPlan, tokens: int) -> Int32:
        """The adapter of each of so many tokens, those that fill up a batch last; empty if none has one."""
        adapters = np.full(tokens if self.has_adapters(plan) else 0, -1, np.int32)
        if len(adapters):
            row_adapters = np.repeat(self.adapters[plan.slots], plan.num_tokens)
            adapters[: len(row_adapters)] = row_adapters
        return adapters

    def _padded_rows(self, plan: StepPlan, into: ForwardBatch | None) -> tuple[Int32, Int32, Int32]:
        """Slots [R], computed tokens [R] and query_start [R + 1] of the plan's rows and those that fill up `into`."""
        rows = len(plan.slots)
        count = rows if into is None else len(into.seq_lens)
        slots = np.full(count, self._padding_slot, np.int32)
        computed, counts = np.zeros(count, np.int32), np.zeros(count, np.int32)
        slots[:rows], computed[:rows], counts[:rows] = plan.slots, plan.num_computed, plan.num_tokens
        if into is not None and len(into.input_ids) == count:
            counts[rows:] = 1
        elif into is not None:
            counts[-1] += len(into.input_ids) - counts.sum()
        query_start = np.zeros(count + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        return slots, computed, query_start

    def _unfilled(self, tokens: int, rows: int, width: int, query_start: Tensor, kv: Pages) -> ForwardBatch:
        """A batch of uninitialized tensors; `width`: columns of the block tables."""
        torch_device = self._device.torch_device
        return ForwardBatch(
            input_ids=torch.empty(tokens, dtype=torch.int64, device=torch_device),
            positions=torch.empty(tokens, dtype=torch.int64, device=torch_device),
            query_start=query_start,
            seq_lens=torch.empty(rows, dtype=torch.int32, device=torch_device),
            block_tables=torch.empty(rows, width, dtype=torch.int32, device=torch_device),
            slot_mapping=torch.empty(tokens, dtype=torch.int64, device=torch_device),
            kv=kv,
        )

    def columns(self) -> SamplingColumns:
        """The columns of this step's rows of logits, which `build` copied over."""
        assert self._columns is not None, "no step was built"
        return self._columns

    def write_sampled(self, columns: SamplingColumns, token_ids: Tensor) -> None:
        """Put tokens [n] sampled for these rows of logits into the device's table, for the next step."""
        assert columns.slots is not None
        self._device_tokens.index_put_((columns.slots, columns.lengths), token_ids.int())


def _fill_states(into: StateRows, columns: Sequence[Tensor]) -> None:
    for tensor, column in zip((into.rows, into.start, into.end, into.saves), columns, strict=True):
        tensor.copy_(column)


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
