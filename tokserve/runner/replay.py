"""Captured steps: what a backend replays instead of launching a step's operations one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from tokserve.layers.batch import ForwardBatch
from tokserve.protocol.plan import StepPlan

Step = Callable[[ForwardBatch], Tensor]  # what is captured: from a batch to its logits or hidden states


class Replay(Protocol):
    """Steps captured for some sizes.  What one replay returns is good until the next."""

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan can be replayed."""

    def replay(self, plan: StepPlan) -> Tensor:
        """Compute a plan that fits; the rows of what was captured that are the plan's, in its order."""

    def invalidate(self) -> None:
        """Drop what was captured: the weights or the KV memory that it reads have changed."""


def is_decode(plan: StepPlan) -> bool:
    """Whether each row computes one token and samples one."""
    rows = len(plan.slots)
    return bool(np.count_nonzero(plan.num_tokens == 1) == rows == np.count_nonzero(plan.num_logits == 1))
