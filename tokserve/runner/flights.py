"""A step that has begun: what was planned, and its result once the device has it.

A device that works on its own takes the next step before the host knows this one's tokens.  This file must not know
how a step is computed.
"""

from __future__ import annotations

import numpy as np

from tokserve.plan import Int32, LogprobRows, StepPlan, StepResult
from tokserve.runner.sampler import Drawing, Drawn
from tokserve.runner.slots import Int64

NOTHING = Drawn(np.zeros(0, np.int32), np.zeros(0, np.bool_), None)


def sampled(plan: StepPlan) -> tuple[Int32, Int64]:
    """Slots of the rows that draw a token, and how many tokens are before it."""
    lengths = np.add(plan.num_computed, plan.num_tokens, dtype=np.int64)
    if np.count_nonzero(plan.samples) == len(plan.samples):
        return plan.slots, lengths
    return plan.slots[plan.samples], lengths[plan.samples]


class Flight:
    """A plan under way.  `slots`, `lengths`: as `sampled` has them; `drawing` None: no row draws."""

    def __init__(
        self,
        plan: StepPlan,
        slots: Int32,
        lengths: Int64,
        drawing: Drawing | None,
        prompt_logprobs: dict[int, LogprobRows],
    ) -> None:
        self.slots, self.lengths = slots, lengths
        self._plan = plan
        self._drawing = drawing
        self._prompt_logprobs = prompt_logprobs
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for it; any thread may ask, and ask again."""
        if self._result is None:
            drawn = NOTHING if self._drawing is None else self._drawing.result()
            self._result = StepResult(
                self._plan.step, drawn.token_ids, drawn.finite, drawn.logprobs, self._prompt_logprobs, drawn.forbidden
            )
        return self._result
