"""Captured decode steps on the CPU, a graph for each number of rows, with adapters and without, captured at first use.

The time that the interpreter and torch take per op and layer is spent once; a replayed step is one call.  Rows do not
touch each other and a replayed op is the same op, so bits are those of a step that is not captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tokserve.layers.batch import ForwardBatch, Pages
from tokserve.ops.cpu.capture import CaptureMemory, NotCapturable, capture
from tokserve.plan import StepPlan
from tokserve.runner.host_slots import DecodeBatch, HostSlots
from tokserve.runner.replay import Step, is_decode
from tokserve.runner.routed import RoutedTable

MAX_ROWS = 64  # of more rows the interpreter's share is small, and their logits are large

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CpuGraph:
    """A captured step of `batch`, whose tensors are filled in before each replay."""

    batch: DecodeBatch
    logits: Tensor  # [rows, V], good until the next step
    run: Callable[[], None]


class CpuGraphs:
    """`Replay` of `step`, from a batch to logits [R, V].  `row_bytes`: what a row of a step takes at most.  `routed`:
    takes the chosen experts."""

    def __init__(
        self, slots: HostSlots, kv: Pages, step: Step, row_bytes: int, routed: RoutedTable | None = None
    ) -> None:
        self._routed = routed
        self._slots = slots
        self._kv = kv
        self._step = step
        self._memory = CaptureMemory(MAX_ROWS * row_bytes)
        self._captured: dict[tuple[int, bool], CpuGraph] = {}  # by number of rows, and whether one has an adapter
        self._can_capture = True

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that were captured."""
        return sorted({rows for rows, _ in self._captured})

    def fits(self, plan: StepPlan) -> bool:
        return self._can_capture and len(plan.slots) <= MAX_ROWS and is_decode(plan)

    def replay(self, plan: StepPlan) -> Tensor:
        key = (len(plan.slots), self._slots.has_adapters(plan))
        graph = self._captured.get(key)
        if graph is None:
            return self._capture(plan, key)
        self._slots.fill(plan, graph.batch)
        graph.run()
        self._store(graph.batch.batch)
        return graph.logits

    def invalidate(self) -> None:
        self._captured.clear()
        self._can_capture = True

    def _capture(self, plan: StepPlan, key: tuple[int, bool]) -> Tensor:
        rows, adapted = key
        batch = self._slots.decode_batch(rows, self._kv, adapters=adapted)
        self._slots.fill(plan, batch)
        batch.batch.routed = None if self._routed is None else []
        try:
            logits, run = capture(lambda: self._step(batch.batch), self._memory)
        except NotCapturable as error:
            logger.info("decode steps run op by op: %s", error)
            self._can_capture = False
            batch.batch.routed = None if self._routed is None else []
            logits = self._step(batch.batch)
        else:
            self._captured[key] = CpuGraph(batch, logits, run)
        self._store(batch.batch)
        return logits

    def _store(self, batch: ForwardBatch) -> None:
        if self._routed is not None and batch.routed is not None:
            self._routed.store(batch.slot_mapping, batch.routed)
