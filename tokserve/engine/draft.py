"""A step's plan while it is made: rows under a budget, and what the device is told of them.

Which request gets a row is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tokserve.engine.request import Request
from tokserve.plan import Masks, NewRow, StepPlan


@dataclass(slots=True)
class Row:
    """`count` positions from `start` of a request in one step; `samples`: a token is drawn after the last."""

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Draft:
    """A plan being made.  `short`: blocks are or were missing in this step, so nobody is admitted."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    short: bool = False

    def add(self, request: Request, count: int) -> None:
        """A row for a request."""
        start = request.computed
        self.rows.append(Row(request, start, count, start + count == request.wanted))
        self.budget -= count

    def extend(self, row: Row, count: int) -> None:
        """More positions in a row."""
        row.count += count
        row.samples = row.start + row.count == row.request.wanted
        self.budget -= count

    def drop(self, request: Request) -> None:
        """A request that was preempted has no row."""
        for row in self.rows:
            if row.request is request:
                self.rows.remove(row)
                self.budget += row.count
                return

    def plan(self, step: int, done: list[int]) -> StepPlan:
        """The plan for the device, whose positions count as computed from here on; `done`: slots that were freed."""
        rows = self.rows
        if any(row.request.adapter is not None for row in rows):  # the device reads an adapter once for neighbours
            rows.sort(key=lambda row: -1 if row.request.adapter is None else row.request.adapter.slot)
        blocks = []
        masked = []
        for row in rows:
            request = row.request
            table = request.table.blocks
            if len(table) > request.blocks_sent:
                blocks.append((request.slot, request.blocks_sent, table[request.blocks_sent :]))
                request.blocks_sent = len(table)
            request.computed += row.count
            request.pending += row.samples
            request.drawn = request.drawn or row.samples
            request.in_flight += 1
            if request.follower is not None and row.samples:
                masked.append(request)
        return StepPlan(
            step=step,
            slots=np.array([row.request.slot for row in rows], np.int32),
            num_tokens=np.array([row.count for row in rows], np.int32),
            num_computed=np.array([row.start for row in rows], np.int32),
            samples=np.array([row.samples for row in rows], np.bool_),
            new=self.new,
            blocks=blocks,
            done=done,
            masks=_masks(masked),
        )


def _masks(requests: Sequence[Request]) -> Masks | None:
    """What their grammars allow these to draw."""
    words = [request.follower.words for request in requests if request.follower is not None]
    return Masks(np.array([request.slot for request in requests], np.int32), np.stack(words)) if words else None
