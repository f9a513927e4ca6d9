"""The tables of the runner, a row per slot: tokens, block numbers and the columns that sampling reads.

A plan names slots and counts; everything else about a running request is here, so a step is built from columns, and the
next plan can be made before this step's tokens are known to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from tokserve.protocol.images import ImageFormat
from tokserve.protocol.params import SamplingParams, wrap_seed
from tokserve.protocol.plan import Int32, NewRow, StepPlan

Int64 = NDArray[np.int64]
MIN_TEMPERATURE = 2.0**-100  # lower temperatures count as this one, which leaves only the largest logit as well
MAX_TEMPERATURE = 2.0**100  # higher ones count as this one, at which all tokens that may be sampled are equally likely
NO_LIMIT = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """What sampling reads of n rows of logits, as tensors on the device.  `slots`, `filters`: where the device has
    tables of its own."""

    seeds: Tensor  # [n] int64
    lengths: Tensor  # [n] int64, tokens before the new one
    greedy: Tensor  # [n] bool
    temperature: Tensor  # [n] float32
    slots: Tensor | None = None  # [n] int64
    filters: tuple[Tensor, ...] | None = None  # top_k [n] int32, top_p and min_p [n] float32

    def take(self, index: Tensor) -> SamplingColumns:
        """These rows only."""
        slots = None if self.slots is None else self.slots[index]
        filters = None if self.filters is None else tuple(column[index] for column in self.filters)
        return SamplingColumns(
            self.seeds[index], self.lengths[index], self.greedy[index], self.temperature[index], slots, filters
        )


def last_indices(ends: Int64 | Int32, counts: Int32) -> Int64:
    """The counts[i] numbers before ends[i] for each row, ascending, all rows one after the other."""
    bounds = np.add.accumulate(counts, dtype=np.int64)
    shifts: Int64 = np.subtract(ends, bounds, dtype=np.int64)
    return np.arange(bounds[-1] if len(bounds) else 0) + shifts.repeat(counts)


def logit_lengths(plan: StepPlan) -> tuple[Int32, Int64]:
    """Slots of the rows of logits, and the number of tokens before each sampled one."""
    lengths = np.add(plan.num_computed, plan.num_tokens, dtype=np.int64)
    if np.count_nonzero(plan.num_logits == 1) == len(plan.slots):
        return plan.slots, lengths
    return plan.slots.repeat(plan.num_logits), last_indices(lengths + 1, plan.num_logits)


class Slots:
    """Tables indexed by slot number, in the host's memory.  The tensors of a batch are copies, never views of these."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.images: ImageFormat | None = None  # of a model that reads some
        width = -(-max_model_len // block_size)
        # one column more than a context: a token sampled at the very end has a place
        self.tokens: Int32 = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.blocks: Int32 = np.zeros((max_num_seqs, width), np.int32)
        self.prompt_lens: Int64 = np.zeros(max_num_seqs, np.int64)
        self.seeds: Int64 = np.zeros(max_num_seqs, np.int64)
        self.greedy: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.temperature: NDArray[np.float32] = np.ones(max_num_seqs, np.float32)  # 1 for greedy rows
        # of the processor of top-k, top-p and min-p; neutral where it is not needed
        self.top_k: Int32 = np.zeros(max_num_seqs, np.int32)  # 0: off
        self.top_p: NDArray[np.float32] = np.ones(max_num_seqs, np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(max_num_seqs, np.float32)
        self.adapters: Int32 = np.full(max_num_seqs, -1, np.int32)
        self._generation: Int64 = np.zeros(max_num_seqs, np.int64)  # how often a slot was assigned
        self._with_adapter: set[int] = set()  # slots
        # slot -> the most tokens that can be computed, as its last step rejected drafts; for the next plan only
        self._limits: dict[int, int] = {}

    def assign(self, row: NewRow) -> None:
        """A request takes the slot."""
        slot, task = row.slot, row.task
        temperature = task.temperature if isinstance(task, SamplingParams) else 0.0
        self._generation[slot] += 1
        self._limits.pop(slot, None)
        self.tokens[slot, : len(row.tokens)] = row.tokens
        self.prompt_lens[slot] = row.prompt_len
        self.adapters[slot] = row.adapter
        (self._with_adapter.add if row.adapter >= 0 else self._with_adapter.discard)(slot)
        self.seeds[slot] = wrap_seed(row.seed)
        self.greedy[slot] = temperature == 0.0
        self.temperature[slot] = 1.0 if temperature == 0.0 else min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)

    def extend(self, slot: int, first: int, blocks: list[int]) -> None:
        """Append to the slot's block table, from index `first` on."""
        self.blocks[slot, first : first + len(blocks)] = blocks

    def generation(self, slots: Int32) -> Int64:
        """Numbers that change when a slot is assigned."""
        return self._generation[slots]

    def limit_computed(self, slots: Int32, num_computed: Int64) -> None:
        """These slots have no more computed tokens than this: later drafts of theirs were rejected."""
        self._limits.update(zip(slots.tolist(), num_computed.tolist(), strict=True))

    def corrected(self, plan: StepPlan) -> StepPlan:
        """The plan, which may have been made before drafts were rejected, with the true `num_computed`."""
        if not self._limits:
            return plan
        limits = [self._limits.get(slot, NO_LIMIT) for slot in plan.slots.tolist()]
        self._limits.clear()
        return replace(plan, num_computed=np.minimum(plan.num_computed, np.array(limits, np.int32)))

    def write(self, slots: Int32, positions: Int64, token_ids: Int32) -> None:
        """Put a token [n] at a position of each of these slots."""
        self.tokens[slots, positions] = token_ids

    def history(self, slots: Int32, width: int) -> Tensor:  # [n, width] int32
        """The first `width` tokens of these slots, where the logits are; entries past a row's length mean nothing."""
        return torch.from_numpy(self.tokens[slots, :width])

    def write_drafts(self, plan: StepPlan) -> None:
        """Put the plan's drafts after their rows' tokens."""
        positions = last_indices(plan.num_computed + plan.num_tokens, plan.num_drafts)
        self.tokens[np.repeat(plan.slots, plan.num_drafts), positions] = plan.draft_token_ids

    def has_adapters(self, plan: StepPlan) -> bool:
        """Whether a row of the plan has an adapter."""
        return bool(self._with_adapter) and bool((self.adapters[plan.slots] >= 0).any())
