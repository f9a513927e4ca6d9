"""The runner in the engine's own process.

With depth 1 a step runs in the calling thread, so a debugger sees one stack from the loop to the kernel; with depth 2
the whole life of the runner is in one worker thread, and the caller plans the next step meanwhile.  Calls that may take
long run in a background thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tokserve.base.memory import no_collections
from tokserve.config import Config
from tokserve.protocol.plan import DeviceFacts, GrammarBitmask, Int32, StepPlan, StepResult

if TYPE_CHECKING:
    from tokserve.runner.runner import Runner

T = TypeVar("T")


def _current_device() -> int | None:
    """The GPU that this thread has chosen, if it has used one: threads begin with the first."""
    torch = sys.modules.get("torch")  # where it is not imported, no device was chosen
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None


def _use_device(device: int | None) -> None:
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)


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
        self._thread: ThreadPoolExecutor | None = None
        if config.scheduler.steps_in_flight > 1:
            self._thread = ThreadPoolExecutor(1, "runner", _use_device, (_current_device(),))
        self._background = ThreadPoolExecutor(1, "weights")  # its thread starts with the first call
        self._lanes: dict[str, ThreadPoolExecutor] = {}  # of copies of KV blocks
        self._runner: Runner | None = None
        self._drafts: Callable[[], Int32] = lambda: np.zeros(0, np.int32)
        self._finish: Callable[[GrammarBitmask | None], Callable[[], StepResult]] | None = None  # of a forward pass

    def start(self) -> DeviceFacts:
        """Load the model."""
        return self._run(self._load)

    def _load(self) -> DeviceFacts:
        with no_collections():
            from tokserve.runner.startup import load_runner  # brings torch

        self._runner, facts = load_runner(self._config)
        return facts

    def forward(self, plan: StepPlan) -> None:
        """Run a forward pass, or have the worker thread run it and wait for the bitmask."""
        runner = self._loaded()
        if self._finish is not None:
            raise RuntimeError("the last forward pass was not sampled from")
        if self._thread is None:
            step = runner.forward(plan)
            self._drafts = lambda: step.plan.draft_token_ids
            self._finish = lambda bitmask: runner.sample(step, bitmask).result
            return
        bitmasks: SimpleQueue[GrammarBitmask | None] = SimpleQueue()
        forward = self._thread.submit(runner.forward, plan)
        pending = self._thread.submit(lambda: runner.sample(forward.result(), bitmasks.get()))
        self._drafts = lambda: forward.result().plan.draft_token_ids

        def finish(bitmask: GrammarBitmask | None) -> Callable[[], StepResult]:
            bitmasks.put(bitmask)
            return lambda: pending.result().result()

        self._finish = finish

    def sample(self, bitmask: GrammarBitmask | None) -> Future[StepResult]:
        """Sample from the last forward pass; the caller of `result` waits for the device."""
        finish, self._finish = self._finish, None
        if finish is None:
            raise RuntimeError("there is no forward pass to sample from")
        return Deferred(finish(bitmask))

    def drafts(self) -> Int32:
        """The drafts of the last forward pass; with a worker thread, wait for it."""
        if self._finish is None:
            raise RuntimeError("there is no forward pass to sample from")
        return self._drafts()

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """Wait for the steps begun so far, then call."""
        if self._finish is not None:
            raise RuntimeError("the last forward pass was not sampled from")
        return self._run(self._loaded().call, method, args)

    def background(self, method: str, args: dict[str, Any]) -> Future[Any]:
        """Call in the background thread."""
        return self._background.submit(self._loaded().background, method, args)

    def copy(self, lane: str, method: str, args: dict[str, Any]) -> Future[Any]:
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(1, f"kv-{lane}", _use_device, (_current_device(),))
        return self._lanes[lane].submit(self._loaded().copy, method, args)

    def interrupt(self) -> None:
        """Make what the background thread waits for fail."""
        self._loaded().interrupt()

    def watch(self, wake: Callable[[], object]) -> None:
        """The device is this process's own."""

    def check(self) -> None:
        """It is there as long as this process is."""

    def close(self) -> None:
        """Wait for what runs, then drop the model."""
        if self._runner is not None:
            self._runner.interrupt()
        self._background.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            if self._finish is not None:
                self._finish(None)  # the worker thread waits for it
            self._thread.shutdown()
        self._runner = None

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the executor was not started, or is closed")
        return self._runner

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args) if self._thread is None else self._thread.submit(function, *args).result()
