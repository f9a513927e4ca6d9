"""The runner in the engine's own process.

With depth 1 a step runs in the calling thread, so a debugger sees one stack from the loop to the kernel; with depth 2
the whole life of the runner is in one worker thread, and the caller plans the next step meanwhile.  Calls that may take
long run in a background thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tokserve.config import Config
from tokserve.plan import DeviceFacts, GrammarBitmask, StepPlan, StepResult

if TYPE_CHECKING:
    from tokserve.runner.runner import Runner
    from tokserve.runner.steps import PendingResult, PendingStep

T = TypeVar("T")


class Deferred(Future[T]):
    """A future whose value the first caller of `result` computes, or waits for."""

    def __init__(self, compute: Callable[[], T]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> T:
        """The value; an exception of the computation reaches the caller as it is."""
        if not self.done():
            self.set_result(self._compute())
        return super().result(timeout)


class InlineExecutor:
    """Executor protocol, see `base`.  An exception of the runner reaches the caller as it is."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, "runner") if config.scheduler.depth > 1 else None
        self._background = ThreadPoolExecutor(1, "weights")  # its thread starts with the first call
        self._runner: Runner | None = None
        self._step: Callable[[], PendingStep] | None = None  # not sampled from

    def start(self) -> DeviceFacts:
        """Load the model."""
        return self._begin(self._load)()

    def _load(self) -> DeviceFacts:
        from tokserve.runner.startup import load  # brings torch

        self._runner, facts = load(self._config)
        return facts

    def forward(self, plan: StepPlan) -> None:
        """Run a forward pass, or queue it for the worker thread."""
        if self._step is not None:
            raise RuntimeError("the last forward pass was not sampled from")
        self._step = self._begin(self._loaded().forward, plan)

    def sample(self, bitmask: GrammarBitmask | None) -> Future[StepResult]:
        """Sample from the last forward pass, or queue that; the caller of `result` waits for the device."""
        step, self._step = self._step, None
        if step is None:
            raise RuntimeError("there is no forward pass to sample from")
        result = self._begin(self._sample, self._loaded(), step, bitmask)
        return Deferred(lambda: result().result())

    @staticmethod
    def _sample(runner: Runner, step: Callable[[], PendingStep], bitmask: GrammarBitmask | None) -> PendingResult:
        return runner.sample(step(), bitmask)

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """Wait for the steps begun so far, then call."""
        return self._begin(self._loaded().call, method, args)()

    def background(self, method: str, args: dict[str, Any]) -> Future[Any]:
        """Call in the background thread."""
        return self._background.submit(self._loaded().background, method, args)

    def interrupt(self) -> None:
        """Make what the background thread waits for fail."""
        self._loaded().interrupt()

    def close(self) -> None:
        """Wait for what runs, then drop the model."""
        if self._runner is not None:
            self._runner.interrupt()
        self._background.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.shutdown()
        self._runner = self._step = None

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the executor was not started, or is closed")
        return self._runner

    def _begin(self, function: Callable[..., T], *args: Any) -> Callable[[], T]:
        """Call now, or queue the call for the worker thread; returns how to get its value."""
        if self._thread is not None:
            return self._thread.submit(function, *args).result
        value = function(*args)
        return lambda: value
