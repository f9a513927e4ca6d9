"""How the engine reaches its device: the `Executor` protocol, and the one place that picks an implementation.

An executor carries plans down and results up, in order.  It knows neither requests nor policy, and importing
this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from tokserve.base.rooms import part
from tokserve.config import Config
from tokserve.executor.inline import InlineExecutor
from tokserve.protocol.plan import DeviceFacts, GrammarBitmask, Int32, StepPlan, StepResult

Lane = Literal["pages", "read", "write"]  # between pages and memory, from files, to files


class Executor(Protocol):
    """One model on its device or devices."""

    def start(self) -> DeviceFacts:
        """Load the model and allocate the cache; called once, first.  Raises StartError."""

    def forward(self, plan: StepPlan) -> None:
        """Begin the forward pass of a plan, after all earlier ones; every `forward` is followed by its `sample`."""

    def sample(self, bitmask: GrammarBitmask | None) -> Future[StepResult]:
        """Sample from the oldest forward pass that was not sampled from.  `bitmask`: of its rows with a grammar, None
        if there are none.  The future may be finished already; results come in order."""

    def drafts(self) -> Int32:
        """The draft ids of the newest plan, whose forward pass was not sampled from, with those that the device drew.
        It waits for them."""

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """An admin method of the runner by name, after all steps begun so far."""

    def background(self, method: str, args: dict[str, Any]) -> Future[Any]:
        """A method of the runner beside the steps, after all earlier ones of this kind; it may take long."""

    def copy(self, lane: Lane, method: str, args: dict[str, Any]) -> Future[Any]:
        """A method of the copies of KV blocks beside the steps, after all earlier ones of its lane."""

    def interrupt(self) -> None:
        """Make what `background` is waiting for fail soon."""

    def watch(self, wake: Callable[[], object]) -> None:
        """Call `wake`, from any thread, if the device is lost; `check` raises then."""

    def check(self) -> None:
        """Raise DeviceLost, which says why, if the device is lost."""

    def close(self) -> None:
        """Free the device; nothing is called afterwards."""


def make(config: Config) -> Executor:
    """The executor for this configuration; it loads no model before `start`."""
    if config.parallel.num_ranks == 1:
        return InlineExecutor(config)
    executor: Executor = part("ranks", "executor")(config)
    return executor
