"""Steps of most sizes are captured while the engine has nothing to do: a server answers a second earlier."""

from __future__ import annotations

from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature


def make(context: EngineContext) -> IdleCapture | None:
    """The feature of a GPU on which steps are captured."""
    runtime = context.config.runtime
    return IdleCapture(context) if runtime.device == "cuda" and not runtime.enforce_eager else None


class IdleCapture(EngineFeature):
    """Captures one size a turn of the idle loop, so that a request waits for one capture at most."""

    def __init__(self, context: EngineContext) -> None:
        self._executor, self._scheduler = context.executor, context.scheduler
        self._requests, self._control = context.requests, context.control
        self._are_missing = True

    def poll(self) -> None:
        if self._may_capture:
            self._are_missing = self._executor.call("capture_next", {}) > 0

    def seconds_left(self) -> float | None:
        return 0.0 if self._may_capture else None

    @property
    def _may_capture(self) -> bool:
        if not self._are_missing or self._scheduler.in_flight or self._control.frozen:
            return False
        return next(iter(self._requests.live), None) is None
