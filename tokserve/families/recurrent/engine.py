"""Recurrent states as the engine's loop sees them: how far each request's state is, and the snapshots of prefixes."""

from __future__ import annotations

from typing import Any

from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.plan_builder import InFlightStep, PlanBuilder
from tokserve.engine.request import Request, State
from tokserve.families.recurrent.snapshots import Snapshots
from tokserve.protocol.plan import StepResult


def make(context: EngineContext) -> EngineFeature | None:
    """The feature of a model with recurrent states; None for others."""
    states, cache = context.facts.layout.states, context.cache
    return None if states is None else RecurrentStates(cache, states.snapshots, states.interval // cache.block_size)


class RecurrentStates(EngineFeature):
    """`num_snapshots` snapshots, one every `interval` blocks of a request."""

    def __init__(self, cache: PrefixCache, num_snapshots: int, interval: int) -> None:
        self._cache = cache
        self._snapshots = cache.snapshots = Snapshots(num_snapshots, interval)
        self._positions: dict[Request, int] = {}  # of states, once what is planned is computed

    def on_slot(self, request: Request, hits: int) -> dict[str, Any]:
        position = self._positions[request] = hits * self._cache.block_size
        return {"num_state": position, "snapshot": self._cache.snapshot_after(request.table, hits)}

    def on_end(self, request: Request) -> None:
        self._positions.pop(request, None)

    def plan(self, builder: PlanBuilder) -> None:
        """States go on to the first draft of each row; take the snapshots that are due on the way."""
        for row in builder.rows:
            request = row.request
            start, end = self._positions[request], request.num_computed + row.num_tokens - len(row.drafts)
            row.saves = self._cache.plan_saves(request.table, start, end)
            self._positions[request] = max(start, end)

    def before_update(self, step: InFlightStep, result: StepResult, seconds: float) -> None:
        """Steps in flight were planned to go on from the last draft, of which some may be rejected."""
        for row, count in zip(step.rows, result.counts.tolist(), strict=True):
            request = row.request
            if request.state is not State.ENDED and request.steps_in_flight > 1:
                self._positions[request] -= row.num_logits - count

    def on_result(self, step: InFlightStep, result: StepResult, now: float) -> None:
        for row in step.rows:
            if row.saves:
                self._cache.record_saves(row.request.table, row.saves, result.saved)

    def stats(self) -> dict[str, Any]:
        return {"snapshots": self._snapshots.num_kept}
