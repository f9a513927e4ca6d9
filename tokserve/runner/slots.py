"""The device's tables, one row per slot: tokens, block numbers and the columns that sampling reads.

A plan names slots and counts; everything else about a running request is here, so that a step can be
built from columns and the next plan can be made before this step's tokens are known to the host.  Knows
nothing of models, of logits or of why a request is scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.layers.batch import ForwardBatch, LogitsRows, Pages
from tokserve.plan import Int32, NewRow, StepPlan

Int64 = NDArray[np.int64]
COLDEST = 2.0**-100  # lower temperatures count as this one, which leaves only the largest logit as well


@dataclass(frozen=True, slots=True)
class Columns:
    """What drawing reads of n rows, as tensors."""

    seeds: Tensor  # [n] int64
    lengths: Tensor  # [n] int64, tokens before the new one
    greedy: Tensor  # [n] bool
    temperature: Tensor  # [n] float32


def last_tokens(plan: StepPlan) -> Int64:
    """Where the last tokens of the rows that draw are among the plan's tokens."""
    return np.cumsum(plan.num_tokens, dtype=np.int64)[plan.samples] - 1


class Slots:
    """Tables indexed by slot number.  The torch tensors of a batch are copies, never views of these."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        width = -(-max_model_len // block_size)
        # one column more than a context: a token drawn at the very end has a place to go
        self.tokens: Int32 = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.blocks: Int32 = np.zeros((max_num_seqs, width), np.int32)
        self.prompt_lens: Int64 = np.zeros(max_num_seqs, np.int64)
        self.seeds: Int64 = np.zeros(max_num_seqs, np.int64)
        self.greedy: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.temperature: NDArray[np.float32] = np.ones(max_num_seqs, np.float32)  # 1 for greedy rows
        self.adapters: Int32 = np.full(max_num_seqs, -1, np.int32)
        self._generation: Int64 = np.zeros(max_num_seqs, np.int64)  # how often a slot was entered
        self._count = np.arange(max(max_num_seqs, 1) + 1, dtype=np.int32)

    def enter(self, row: NewRow) -> None:
        """A request takes the slot."""
        slot = row.slot
        self._generation[slot] += 1
        self.tokens[slot, : len(row.tokens)] = row.tokens
        self.prompt_lens[slot] = row.prompt_len
        self.adapters[slot] = row.adapter
        self.seeds[slot] = (row.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self.greedy[slot] = row.params.temperature == 0.0
        self.temperature[slot] = 1.0 if self.greedy[slot] else max(row.params.temperature, COLDEST)

    def extend(self, slot: int, first: int, blocks: list[int]) -> None:
        """Append to the slot's block table, from index `first` on."""
        self.blocks[slot, first : first + len(blocks)] = blocks

    def generation(self, slots: Int32) -> Int64:
        """Numbers that change when a slot is entered."""
        return self._generation[slots]

    def learn(self, slots: Int32, lengths: Int64, generation: Int64, token_ids: Int32) -> None:
        """Tokens drawn a step ago, for those slots that have not been entered since."""
        same = self._generation[slots] == generation
        self.tokens[slots[same], lengths[same]] = token_ids[same]

    def last(self, plan: StepPlan) -> Tensor:
        """Where the last tokens of the rows that draw are in the batch, [n] int64."""
        return torch.from_numpy(last_tokens(plan))

    def ends(self, plan: StepPlan, batch: ForwardBatch) -> LogitsRows | None:
        """Those last tokens of the batch; None if they are all there are."""
        if np.count_nonzero(plan.samples) == len(batch.input_ids):
            return None
        rows = torch.from_numpy(np.flatnonzero(plan.samples))  # [n]
        query_start = torch.from_numpy(self._count[: len(rows) + 1].copy())
        return LogitsRows(
            self.last(plan), query_start, batch.seq_lens.index_select(0, rows),
            batch.block_tables.index_select(0, rows),
            None if batch.adapters is None else torch.from_numpy(self.adapters[plan.slots[plan.samples]]),
        )  # fmt: skip

    def columns(self, slots: Int32, lengths: Int64) -> Columns:
        """What drawing for the step's rows reads."""
        return Columns(
            torch.from_numpy(self.seeds[slots]), torch.from_numpy(lengths),
            torch.from_numpy(self.greedy[slots]), torch.from_numpy(self.temperature[slots]),
        )  # fmt: skip

    def keep(self, token_ids: Tensor) -> None:
        """Tokens drawn for the step's rows; here `learn` is soon enough."""

    def blank(self, rows: int, kv: Pages, *, adapters: bool = False) -> ForwardBatch:
        """A batch of `rows` decode rows, with or without adapters, for `build` to fill again and again."""
        return ForwardBatch(
            input_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.zeros(rows, dtype=torch.int64),
            query_start=torch.arange(rows + 1, dtype=torch.int32),
            seq_lens=torch.zeros(rows, dtype=torch.int32),
            block_tables=torch.zeros(rows, self.blocks.shape[1], dtype=torch.int32),
            slot_mapping=torch.zeros(rows, dtype=torch.int64),
            kv=kv,
            adapters=torch.full((rows,), -1, dtype=torch.int32) if adapters else None,
        )

    def build(self, plan: StepPlan, kv: Pages, into: ForwardBatch | None = None) -> ForwardBatch:
        """The plan's tokens as one batch; `into`: fill this one, which has as many rows, one token each."""
        slots, computed, counts = plan.slots, plan.num_computed, plan.num_tokens
        rows = len(slots)
        if np.count_nonzero(counts == 1) == rows:  # decode only
            query_start = self._count[: rows + 1].copy()
            owner, positions = slots, computed.astype(np.int64)
        else:
            query_start = np.zeros(rows + 1, np.int32)
            np.cumsum(counts, out=query_start[1:])
            owner = np.repeat(slots, counts)
            positions = np.arange(query_start[-1], dtype=np.int64) + np.repeat(computed - query_start[:-1], counts)
        seq_lens = computed + counts
        pages, offsets = np.divmod(positions, self.block_size)
        width = -(-int(seq_lens.max()) // self.block_size)
        input_ids = self.tokens[owner, positions]  # [T]
        slot_mapping = self.blocks[owner, pages] * np.int64(self.block_size) + offsets  # [T]
        if into is not None:
            into.input_ids.numpy()[:] = input_ids
            into.positions.numpy()[:] = positions
            into.seq_lens.numpy()[:] = seq_lens
            into.block_tables.numpy()[:, :width] = self.blocks[slots, :width]
            into.slot_mapping.numpy()[:] = slot_mapping
            if into.adapters is not None:
                into.adapters.numpy()[:] = self.adapters[slots]
            return into
        return ForwardBatch(
            input_ids=torch.from_numpy(input_ids.astype(np.int64)),
            positions=torch.from_numpy(positions),  # [T]
            query_start=torch.from_numpy(query_start),  # [R + 1]
            seq_lens=torch.from_numpy(seq_lens),  # [R]
            block_tables=torch.from_numpy(self.blocks[slots, :width]),  # [R, width]
            slot_mapping=torch.from_numpy(slot_mapping),
            kv=kv,
            adapters=torch.from_numpy(self.adapters[owner]) if self.has_adapters(plan) else None,  # [T]
        )

    def has_adapters(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has an adapter."""
        return bool((self.adapters[plan.slots] >= 0).any())
