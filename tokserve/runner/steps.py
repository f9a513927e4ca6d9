"""Steps under way: a forward pass before its tokens are sampled, and sampled tokens that may not be on the host yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.protocol.plan import (
    NOT_FINITE,
    OK,
    WITHHELD,
    DraftPasses,
    Int32,
    StepPlan,
    StepResult,
    UInt8,
)
from tokserve.runner.logits import LogitRows
from tokserve.runner.sampler import SampledTokens
from tokserve.runner.tables.slots import Int64, SamplingColumns

NO_TOKENS = SampledTokens(np.zeros(0, np.int32), None)


class AwaitedSample(Protocol):
    """New tokens that may still be on their way to the host."""

    def result(self) -> SampledTokens:
        """Wait for them."""


@dataclass(slots=True)
class PendingStep:
    """A plan that was computed and not sampled from."""

    plan: StepPlan
    rows: LogitRows  # of the logits
    logits: Tensor | None = None  # [n, V]; None: no row samples
    columns: SamplingColumns | None = None
    values: dict[str, dict[int, NDArray[Any]]] = field(default_factory=dict)  # as in `StepResult`
    pooled: dict[int, Callable[[], NDArray[Any]]] = field(default_factory=dict)  # by plan row, not yet on the host
    draft_passes: DraftPasses | None = None
    saved: list[int] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    withheld: NDArray[np.bool_] | None = None  # [R], plan rows whose logits were left out

    def withhold(self, slots: Int32) -> None:
        """Leave out the logits of these slots' rows, which must not sample now."""
        withheld = np.isin(self.plan.slots, slots) & (self.plan.num_logits > 0)
        if self.logits is None or self.columns is None or not withheld.any():
            return
        self.withheld = withheld
        kept = np.flatnonzero(~np.repeat(withheld, self.plan.num_logits))
        if len(kept) == 0:
            self.logits = self.columns = None
            return
        index = torch.from_numpy(kept).to(self.logits.device)
        self.rows, self.columns = self.rows.take(kept), self.columns.take(index)
        self.logits = self.logits.index_select(0, index)


class PendingResult:
    """A step whose tokens were sampled.  `sample` None: no row sampled."""

    def __init__(self, step: PendingStep, sample: AwaitedSample | None) -> None:
        self.plan, self.rows = step.plan, step.rows
        self._sample = sample
        self._values, self._pooled, self._draft_passes = step.values, step.pooled, step.draft_passes
        self._saved, self._totals = step.saved, step.totals
        self._withheld = step.withheld
        self._result: StepResult | None = None
        self.kept: NDArray[np.bool_] | None = None  # [n], logits whose tokens are in the result; None: all

    def result(self) -> StepResult:
        """Wait for the tokens; any thread may call it, and again."""
        if self._result is None:
            self._result = self._finish()
        return self._result

    def new_tokens(self) -> tuple[Int32, Int64, Int32]:
        """Slot, index and id of each token of the result."""
        token_ids = self.result().token_ids
        if self.kept is None:
            return self.rows.slots, self.rows.lengths, token_ids
        return self.rows.slots[self.kept], self.rows.lengths[self.kept], token_ids

    def computed_after_drafts(self) -> tuple[Int32, Int64]:
        """Slots of rows with drafts that got tokens, and how many tokens they have computed since."""
        counts = self.result().counts
        rows = np.flatnonzero((self.plan.num_drafts > 0) & (counts > 0))
        before = self.plan.num_computed[rows] + self.plan.num_tokens[rows] - self.plan.num_logits[rows]
        return self.plan.slots[rows], before + counts[rows]

    def _finish(self) -> StepResult:
        plan = self.plan
        sampled = NO_TOKENS if self._sample is None else self._sample.result()
        token_ids, columns = sampled.token_ids, sampled.columns
        if self._withheld is None and sampled.status is None and len(plan.draft_token_ids) == 0:
            counts, status = plan.num_logits, np.zeros(len(plan.slots), np.uint8)
        else:
            counts, status, self.kept = verify(plan, sampled, self._withheld)
            token_ids = token_ids[self.kept]
            columns = {name: rows.take(self.kept) for name, rows in columns.items()}
        for row, pooled in self._pooled.items():
            vector = pooled()
            if np.isfinite(vector).all():
                self._values.setdefault("pooled", {})[row] = vector
            else:
                status[row] = NOT_FINITE
        passes, saved, totals = self._draft_passes, self._saved, self._totals
        return StepResult(plan.step, counts, token_ids, status, columns, self._values, passes, saved, totals)


def verify(
    plan: StepPlan, sampled: SampledTokens, withheld: NDArray[np.bool_] | None = None
) -> tuple[Int32, UInt8, NDArray[np.bool_]]:
    """Tokens of each plan row [R], its status [R], and which of the sampled tokens [n] count.

    A row's tokens count up to the first that is not the draft that follows it, or that is not OK, which does not count:
    the tokens of as many steps of one token.
    """
    num_logits, drafts = plan.num_logits, plan.draft_token_ids
    counts, status = np.zeros(len(plan.slots), np.int32), np.zeros(len(plan.slots), np.uint8)
    if withheld is not None:
        status[withheld] = WITHHELD
        num_logits = np.where(withheld, 0, num_logits)
        drafts = drafts[~np.repeat(withheld, plan.num_drafts)]
    rows = np.flatnonzero(num_logits)
    if len(rows) == 0:
        return counts, status, np.zeros(0, np.bool_)
    ends = np.cumsum(num_logits[rows])
    starts = ends - num_logits[rows]
    n = len(sampled.token_ids)
    sampled_status = np.full(n, OK, np.uint8) if sampled.status is None else sampled.status
    precedes_draft = np.ones(n, np.bool_)
    precedes_draft[ends - 1] = False
    accepted = np.zeros(n, np.bool_)
    accepted[precedes_draft] = sampled.token_ids[precedes_draft] == drafts
    accepted &= sampled_status == OK
    index = np.arange(n)
    first = np.minimum.reduceat(np.where(accepted, n, index), starts)  # [len(rows)], the first that is not accepted
    counts[rows] = first - starts + (sampled_status[first] == OK)
    status[rows] = np.where(counts[rows] > 0, np.uint8(OK), sampled_status[first])
    return counts, status, index - np.repeat(starts, num_logits[rows]) < np.repeat(counts[rows], num_logits[rows])
