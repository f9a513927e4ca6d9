"""Captured decode steps on the CPU, a graph for each number of tokens, with adapters and without.

A graph is captured at its first use.  A decode step is one in which every token is sampled from: its tokens are of as
many rows, or some are drafts.

The time that the interpreter and torch take per op and layer is spent once; a replayed step is one call.  Rows do not
touch each other and a replayed op is the same op, so bits are those of a step that is not captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tokserve.layers.batch import ForwardBatch, Pages
from tokserve.ops.cpu.capture import CaptureMemory, NotCapturable, capture
from tokserve.protocol.plan import StepPlan
from tokserve.runner.replay import Step, is_decode
from tokserve.runner.tables.host_slots import DecodeBatch, HostSlots
from tokserve.runner.tables.routed import RoutedTable

MAX_TOKENS = 64  # of more tokens the interpreter's share is small, and their logits are large

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CpuGraph:
    """A captured step of `batch`, whose tensors are filled in before each replay."""

    batch: DecodeBatch
    logits: Tensor  # [tokens, V], good until the next step
    run: Callable[[], None]


class CpuGraphs:
    """`Replay` of `step`, from a batch to logits [T, V].  `token_bytes`: what a token of a step takes at most.
    `routed`: takes the chosen experts."""

    def __init__(
        self, slots: HostSlots, kv: Pages, step: Step, token_bytes: int, routed: RoutedTable | None = None
    ) -> None:
        self._routed = routed
        self._slots = slots
        self._kv = kv
        self._step = step
        self._memory = CaptureMemory(MAX_TOKENS * token_bytes)
        self._captured: dict[tuple[int, bool], CpuGraph] = {}  # by number of tokens, and whether one has an adapter
        self._can_capture = True

    @property
    def sizes(self) -> list[int]:
        return sorted({tokens for tokens, _ in self._captured})

    def fits(self, plan: StepPlan) -> bool:
        if not self._can_capture or len(plan.slots) > MAX_TOKENS:
            return False
        if len(plan.saves) > len(plan.slots):
            return False  # a batch has room for one a row
        if len(plan.draft_token_ids) == 0:
            return is_decode(plan)
        return int(np.add.reduce(plan.num_tokens)) <= MAX_TOKENS and np.array_equal(plan.num_tokens, plan.num_logits)

    def replay(self, plan: StepPlan) -> Tensor:
        key = (len(plan.slots) + len(plan.draft_token_ids), self._slots.has_adapters(plan))
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
        num_tokens, adapted = key
        batch = self._slots.decode_batch(num_tokens, self._kv, adapters=adapted)
        self._slots.fill(plan, batch)
        batch.batch.routed = None if self._routed is None else []
        if batch.states is not None:
            batch.states.rows[:] = -1  # a step that has changed states cannot be run again, so here none has
        try:
            logits, run = capture(lambda: self._step(batch.batch), self._memory)
        except NotCapturable as error:
            logger.info("decode steps run op by op: %s", error)
            self._can_capture = False
            batch.batch.routed = None if self._routed is None else []
            self._slots.fill(plan, batch)
            logits = self._step(batch.batch)
        else:
            self._captured[key] = CpuGraph(batch, logits, run)
            if batch.states is not None:
                self._slots.fill(plan, batch)
                run()
        self._store(batch.batch)
        return logits

    def _store(self, batch: ForwardBatch) -> None:
        if self._routed is not None and batch.routed is not None:
            self._routed.store(batch.slot_mapping, batch.routed)
