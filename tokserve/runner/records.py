"""Decode steps of the CPU, recorded when they first come: a graph for each number of rows, with adapters and without.

The time that the interpreter and torch take per op and layer is spent once; a repeated step is one call.  Rows do not
touch each other and a repeated op is the same op, so bits are those of a step that is not recorded.  Knows nothing of
sampling: what is recorded ends with the logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tokserve.layers.batch import ForwardBatch, Pages
from tokserve.ops.cpu.capture import CaptureMemory, NotCapturable, capture
from tokserve.plan import StepPlan
from tokserve.runner.graphs import decodes
from tokserve.runner.slots import Slots

MOST_ROWS = 64  # of more rows the interpreter's share is small, and their logits are large

logger = logging.getLogger(__name__)

Step = Callable[[ForwardBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step of `batch`, whose tensors are filled in before each repetition."""

    batch: ForwardBatch
    logits: Tensor  # [rows, V], good until the next step
    repeat: Callable[[], None]


class Records:
    """As `Graphs`, for a device without memory of its own.  `row_bytes`: what a row of a step takes at most."""

    def __init__(self, slots: Slots, kv: Pages, step: Step, row_bytes: int) -> None:
        self._slots = slots
        self._kv = kv
        self._step = step
        self._memory = CaptureMemory(MOST_ROWS * row_bytes)
        self._recorded: dict[tuple[int, bool], Recorded] = {}  # by number of rows, and whether one has an adapter
        self._possible = True

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that are recorded."""
        return sorted({rows for rows, _ in self._recorded})

    def fitting(self, plan: StepPlan) -> Records | None:
        """This, if the plan is a decode step that can be recorded."""
        return self if self._possible and len(plan.slots) <= MOST_ROWS and decodes(plan) else None

    def run(self, plan: StepPlan) -> Tensor:
        """Logits [R, V] of the plan's rows."""
        recorded = self._recorded.get((len(plan.slots), self._slots.has_adapters(plan)))
        if recorded is None:
            return self._first(plan)
        self._slots.build(plan, self._kv, recorded.batch)
        recorded.repeat()
        return recorded.logits

    def _first(self, plan: StepPlan) -> Tensor:
        rows, adapted = len(plan.slots), self._slots.has_adapters(plan)
        batch = self._slots.blank(rows, self._kv, adapters=adapted)
        self._slots.build(plan, self._kv, batch)
        try:
            logits, repeat = capture(lambda: self._step(batch), self._memory)
        except NotCapturable as error:
            logger.info("decode steps run op by op: %s", error)
            self._possible = False
            return self._step(batch)
        self._recorded[rows, adapted] = Recorded(batch, logits, repeat)
        return logits
