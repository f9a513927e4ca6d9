"""Decode steps recorded once and repeated: a graph for each of a few numbers of rows, in one pool of memory.

A step with one token a row runs in the smallest graph that has as many rows; the rest are padding, whose results nobody
reads.  Rows do not touch each other, so a graph's rows have the bits that a step of their own would give them.  Knows
nothing of sampling: what is recorded ends with the logits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tokserve.device import Device
from tokserve.layers.batch import ForwardBatch
from tokserve.plan import StepPlan
from tokserve.runner.staging import StagedSlots

Pages = list[tuple[Tensor, Tensor]]


def buckets(most: int) -> list[int]:
    """Numbers of rows to record up to `most`, ascending: powers of two up to 8, then by 8, from 256 on by 32."""
    sizes = {1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(256, most + 1, 32), most}
    return sorted(size for size in sizes if size <= most)


def spare_rows(most: int) -> int:
    """Rows of logits that all graphs but the largest keep: their results do not share memory."""
    return sum(buckets(most)) - most


def decodes(plan: StepPlan) -> bool:
    """Whether each row computes one token and draws one."""
    return bool(plan.samples.all() and (plan.num_tokens == 1).all())


@dataclass(frozen=True, slots=True)
class Graph:
    """A recorded step of `batch`, whose tensors are filled in before each run."""

    slots: StagedSlots
    batch: ForwardBatch
    replay: Callable[[], Tensor]  # logits of all rows [rows, V], good until the next run of any graph

    def run(self, plan: StepPlan) -> Tensor:
        """Logits [R, V] of the plan's rows."""
        self.slots.build(plan, self.batch.kv, self.batch)
        return self.replay()[: len(plan.slots)]


class Graphs:
    """One graph per bucket, recorded at start-up, the largest first: the others fit into its memory.

    `adapters`: as many again for steps in which a row has an adapter, so that the others do not pay for it.
    """

    def __init__(
        self, device: Device, slots: StagedSlots, kv: Pages, most: int, step: Callable[[ForwardBatch], Tensor],
        *, adapters: bool = False,
    ) -> None:  # fmt: skip
        self.sizes = buckets(most)
        self._slots = slots
        self._graphs: dict[tuple[int, bool], Graph] = {}
        pool = device.pool()
        for size in reversed(self.sizes):
            for adapted in (True, False) if adapters else (False,):
                batch = slots.blank(size, kv, adapters=adapted)
                self._graphs[size, adapted] = Graph(slots, batch, device.capture(_bound(step, batch), pool))

    def fitting(self, plan: StepPlan) -> Graph | None:
        """The graph for this plan, if it is a decode step of all its rows."""
        rows = len(plan.slots)
        if rows > self.sizes[-1] or not decodes(plan):
            return None
        return self._graphs[self.sizes[bisect_left(self.sizes, rows)], self._slots.has_adapters(plan)]


def _bound(step: Callable[[ForwardBatch], Tensor], batch: ForwardBatch) -> Callable[[], Tensor]:
    return lambda: step(batch)
