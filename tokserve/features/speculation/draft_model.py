"""Drafts drawn by a second model with the noise of the requests: what the served model will most often draw as well.

A token is a function of (logits, parameters, seed, position).  Where the draft model's logits are close to the served
model's, the same noise leads to the same token, at any temperature.  Drafts are verified like all others, so no result
depends on this file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.features.speculation.draft_progress import DraftProgress
from tokserve.features.speculation.quantized_copy import CopyDraft, QuantizedCopy
from tokserve.models.decoder import Decoder
from tokserve.protocol.plan import DRAWN, DraftPasses, Int32, NewRow, StepPlan
from tokserve.runner.backend import Draft
from tokserve.runner.features import RunnerContext, RunnerFeature
from tokserve.runner.logits import LogitRows

if TYPE_CHECKING:
    from tokserve.runner.runner import Runner

NO_IDS = np.zeros(0, np.int32)
Flags = NDArray[np.bool_]


class DraftModel(RunnerFeature):
    """Draws with a backend's `draft`.  A copy of the served model reads and writes the same keys and values: it has
    nothing to catch up with, and what it writes is overwritten when its drafts are verified, in the same step.

    `catch_up`: tokens that the draft model computes in a step beside drafts, for which the step's other requests wait.
    `keeps_drafted`: what drafts that stay have left in its pages is what their tokens would.
    """

    catch_up = 512
    keeps_drafted = True

    def __init__(self, draft: Draft, runner: Runner) -> None:
        self._draft, self._runner = draft, runner
        self._copy = draft.copy if isinstance(draft, CopyDraft) else None
        self._backend = runner.backend
        self._slots = runner.backend.slots
        self._sampler = runner.sampler
        self.progress = None if draft.first_layer == 0 else DraftProgress(self._slots)

    def num_bytes(self) -> Mapping[str, int]:
        """The bytes of its weights."""
        if self._copy is not None:
            return {"draft_bytes": self._copy.num_bytes()}
        parameters = self._draft.model.parameters_by_name().values()
        return {"draft_bytes": sum(math.prod(one.shape) * one.dtype.itemsize for one in parameters)}

    def on_weights(self) -> None:
        """The served model's weights have changed, or another model, perhaps without weights, has taken its place."""
        if self._copy is None:
            return
        if self._runner.admin.has_weights:
            self._copy.follow(self._runner.model)
        else:
            self._copy.rest(self._runner.model)

    def on_pages_lost(self) -> None:
        """The KV cache has lost its contents."""
        if self.progress is not None:
            self.progress.clear()

    def assign(self, row: NewRow) -> None:
        """A request takes a slot."""
        self.release(row.slot)

    def release(self, slot: int) -> None:
        """The slot is free."""
        if self.progress is not None:
            self.progress.release(slot)

    def draw(self, plan: StepPlan) -> tuple[StepPlan, DraftPasses]:
        """The plan with the drafts that it left open, which are in the slots' tables as well."""
        began = time.perf_counter()
        if self._copy is not None:
            self._copy.advance()
        starts = np.cumsum(plan.num_drafts) - plan.num_drafts
        rows = np.flatnonzero(plan.num_drafts)
        rows = rows[plan.draft_token_ids[starts[rows]] == DRAWN]
        slots, counts = plan.slots[rows], plan.num_drafts[rows]
        # positions before the drafts
        lengths = plan.num_computed[rows] + plan.num_tokens[rows] - counts - self._draft.ahead
        computed, sizes = self._missing(plan.num_computed[rows], slots, lengths)
        ready = computed + sizes == lengths
        num_tokens, num_passes = 0, 0
        drawn = np.zeros((len(rows), int(counts.max())), np.int32)
        for number in range(int(counts.max())):
            index = np.flatnonzero(ready & (counts > number) if number else sizes)
            if len(index) == 0:
                break
            ids = self._pass(number, slots[index], computed[index], sizes[index], ready[index])
            drawn[index[ready[index]], number] = ids
            num_tokens += int(sizes[index].sum())
            num_passes += 1
            if number == 0 and self.progress is not None:
                for slot, end in zip(slots[index].tolist(), (computed + sizes)[index].tolist(), strict=True):
                    self.progress.on_computed(slot, end)
            computed, sizes = lengths + number, np.ones_like(counts)
        token_ids = plan.draft_token_ids.copy()
        for row, (start, count) in enumerate(zip(starts[rows].tolist(), counts.tolist(), strict=True)):
            token_ids[start : start + count] = drawn[row, :count]
            if self.progress is not None and self.keeps_drafted and ready[row]:
                self.progress.on_drafted(int(slots[row]), drawn[row, : count - 1])
        passes = DraftPasses(time.perf_counter() - began, num_passes, num_tokens, rows[~ready].tolist())
        return replace(plan, draft_token_ids=token_ids), passes

    def _missing(self, served: Int32, slots: Int32, lengths: Int32) -> tuple[Int32, Int32]:
        """The first position to compute for each row, and how many of those that are missing: `catch_up` of the rows
        that miss a block and more, together.  `served`: positions that the served model has computed.

        Of rows that share the block that they lack, the first computes it, and the others wait.
        """
        if self.progress is None:
            return served, lengths - served
        ends = zip(slots.tolist(), lengths.tolist(), strict=True)
        computed = np.array([self.progress.computed(slot, length) for slot, length in ends], np.int32)
        sizes, room, size = lengths - computed, self.catch_up, self._slots.block_size
        claimed: set[int] = set()
        for row in np.argsort(sizes, kind="stable").tolist():
            block = int(self._slots.blocks[slots[row], computed[row] // size])
            if sizes[row] <= size:
                continue
            if block in claimed:
                sizes[row] = 0
                continue
            claimed.add(block)
            sizes[row] = min(sizes[row], room)
            room -= sizes[row]
        return computed, sizes

    def _served_logits(self, logits: Tensor) -> Tensor:
        """The draft model's logits [n, V] as those of the served model's vocabulary."""
        return logits

    def _pass(self, number: int, slots: Int32, computed: Int32, sizes: Int32, has_logits: Flags) -> Int32:
        """Compute so many positions of each slot, and draw what follows those that have logits.  `number`: of the
        step's passes before."""
        if self.progress is not None:
            for slot, start, count in zip(slots.tolist(), computed.tolist(), sizes.tolist(), strict=True):
                self.progress.before_write(slot, start, start + count)
        num_logits = has_logits.astype(np.int32)
        plan = StepPlan(0, slots, sizes, computed, np.zeros_like(sizes), num_logits, NO_IDS)
        logits = self._served_logits(self._backend.draft_logits(plan))
        lengths = (computed + sizes + self._draft.ahead)[has_logits].astype(np.int64)
        drawn_for = slots[has_logits]
        if len(drawn_for) == 0:
            return NO_IDS
        rows = LogitRows(drawn_for, lengths, self._slots.prompt_lens[drawn_for], has_grammar=False)
        token_ids = self._sampler.draw(logits, rows, self._backend.columns(rows))
        self._slots.write(drawn_for, lengths, token_ids)
        return token_ids


def load_draft(config: Config, model: Decoder, load: Callable[[Config], Decoder]) -> Draft | None:
    """What draws drafts for `model`, if the options say so.  `load`: makes a model from options.  Raises StartError."""
    plan = config.speculation.resolved()
    if plan.method == "self":
        copy = QuantizedCopy(model, plan.quantization or "int8")
        return CopyDraft(copy.decoder, 0, DraftModel, copy=copy)
    if plan.method != "draft_model":
        return None
    options = replace(
        config.model,
        model=plan.model,
        quantization=plan.quantization,
        quantize_lm_head=plan.quantization is not None,
        head_dtype="auto",
        hf_overrides=None,
        model_impl="auto",
    )
    second = load(replace(config, model=options))
    if second.spec.vocab != model.spec.vocab:
        raise StartError(
            f"option speculative_config: the draft model's vocabulary has {second.spec.vocab} tokens, and the model's "
            f"{model.spec.vocab}: they must be the same"
        )
    return Draft(second, len(model.kv_specs()), DraftModel)


def make(context: RunnerContext) -> RunnerFeature | None:
    """The feature of a runner whose backend has something that draws."""
    draft = context.runner.backend.draft
    return None if draft is None else draft.feature(draft, context.runner)
