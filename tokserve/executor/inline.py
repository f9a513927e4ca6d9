"""The runner in the engine's own process.

With depth 1 a plan runs in the calling thread, so a debugger sees one stack from the loop to the kernel; with
depth 2 all of the runner's life is in one worker thread, and the caller plans the next step meanwhile.  Weights for an
update are gathered in a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from tokserve.config import Config
from tokserve.plan import DeviceFacts, StepPlan, StepResult

if TYPE_CHECKING:
    from tokserve.runner.runner import Runner

T = TypeVar("T")


class Deferred(Future[T]):
    """A future that is worked out, or waited for, by the first to ask for its result."""

    def __init__(self, work_out: Callable[[], T]) -> None:
        super().__init__()
        self._work_out = work_out

    def result(self, timeout: float | None = None) -> T:
        """The value; an exception of the work reaches the caller as it is."""
        if not self.done():
            self.set_result(self._work_out())
        return super().result(timeout)


class InlineExecutor:
    """Executor protocol, see `base`.  An exception of the runner reaches the caller as it is."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, "runner") if config.scheduler.depth > 1 else None
        self._beside = ThreadPoolExecutor(1, "weights")  # its thread starts with the first call
        self._runner: Runner | None = None

    def start(self) -> DeviceFacts:
        """Load the model."""
        return self._run(self._load).result()

    def _load(self) -> DeviceFacts:
        from tokserve.runner.runner import Runner  # brings torch

        config = self._config
        self._runner = Runner(config.model, config.cache, config.scheduler, config.runtime, config.weights, config.lora)
        return self._runner.load()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Begin a plan, or queue it for the worker thread; whoever asks for the result waits for the device."""
        begun = self._run(self._loaded().launch, plan)
        return Deferred(lambda: begun.result().result())

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """Wait for the plans submitted so far, then call."""
        return self._run(self._loaded().call, method, args).result()

    def background(self, method: str, args: dict[str, Any]) -> Future[Any]:
        """Call in the one thread beside the steps."""
        return self._beside.submit(self._loaded().background, method, args)

    def interrupt(self) -> None:
        """Make what that thread waits for fail."""
        self._loaded().interrupt()

    def close(self) -> None:
        """Wait for what runs, then drop the model."""
        if self._runner is not None:
            self._runner.interrupt()
        self._beside.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.shutdown()
        self._runner = None

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the executor was not started, or is closed")
        return self._runner

    def _run(self, function: Callable[..., T], *args: Any) -> Future[T]:
        if self._thread is not None:
            return self._thread.submit(function, *args)
        future: Future[T] = Future()
        future.set_result(function(*args))
        return future
