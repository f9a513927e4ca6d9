"""What the runner counts, as the engine tells it to front ends."""

from __future__ import annotations

from typing import Any

from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.plan_builder import InFlightStep
from tokserve.protocol.plan import StepResult


class RunnerTotals(EngineFeature):
    """The totals of the last result."""

    def __init__(self, context: EngineContext) -> None:
        self._totals: dict[str, int] = {}

    def on_result(self, step: InFlightStep, result: StepResult, now: float) -> None:
        self._totals = result.totals

    def stats(self) -> dict[str, Any]:
        return self._totals
