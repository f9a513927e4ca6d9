"""What a runner on a GPU is asked for between steps."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tokserve.runner.features import Calls, RunnerContext, RunnerFeature


@runtime_checkable
class CapturesLater(Protocol):
    """A backend that can capture steps after its start, see `cuda.CudaBackend`."""

    def capture_next(self) -> int: ...


def make(context: RunnerContext) -> GpuCalls | None:
    """The feature of a runner on a GPU."""
    backend = context.runner.backend
    return GpuCalls(backend) if isinstance(backend, CapturesLater) else None


class GpuCalls(RunnerFeature):
    """The call `capture_next`."""

    def __init__(self, backend: CapturesLater) -> None:
        self._backend = backend

    def calls(self) -> Calls:
        return {"capture_next": self._backend.capture_next}
