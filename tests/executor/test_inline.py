"""The inline executor: the runner's thread, order and errors, with a runner that records its calls."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.runner.drive import plan_of
from tokserve.config import Config
from tokserve.executor.base import Executor, make
from tokserve.protocol.kv_spec import KVLayout
from tokserve.protocol.plan import DeviceFacts, GrammarBitmask, StepPlan, StepResult

FACTS = DeviceFacts(KVLayout((), 1, 16), 10, "0", {})


@dataclass
class FakeResult:
    """A step that was sampled; `late` says why its result never comes."""

    value: StepResult
    late: Exception | None = None

    def result(self) -> StepResult:
        if self.late is not None:
            raise self.late
        return self.value


class FakeRunner:
    """Remembers what was called, in which thread."""

    calls: list[tuple[Any, ...]] = []

    def _remember(self, *what: Any) -> None:
        FakeRunner.calls.append((*what, threading.current_thread()))

    @staticmethod
    def load(config: Config) -> tuple[FakeRunner, DeviceFacts]:
        runner = FakeRunner()
        runner._remember("load", config)
        return runner, FACTS

    def forward(self, plan: StepPlan) -> StepPlan:
        self._remember("forward", plan.step)
        if plan.step == 13:
            raise ZeroDivisionError
        return plan

    def sample(self, step: StepPlan, bitmask: GrammarBitmask | None) -> FakeResult:
        self._remember("sample", step.step, bitmask)
        return FakeResult(result(step.step))

    def call(self, method: str, args: dict[str, Any]) -> Any:
        self._remember("call", method, args)
        return args

    def background(self, method: str, args: dict[str, Any]) -> Any:
        self._remember("background", method, args)
        return args

    def interrupt(self) -> None:
        """Does nothing: no call waits."""


def result(step: int) -> StepResult:
    none = np.zeros(0, np.int32)
    return StepResult(step, none, none, np.zeros(0, np.uint8))


def run(executor: Executor, step: int, bitmask: GrammarBitmask | None = None) -> Future[StepResult]:
    executor.forward(plan_of([], step))
    return executor.sample(bitmask)


@pytest.fixture(autouse=True)
def runner(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tokserve.runner.startup")
    module.load_runner = FakeRunner.load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokserve.runner.startup", module)
    monkeypatch.setattr(FakeRunner, "calls", [])


def started(depth: int) -> tuple[Executor, Config]:
    config = Config.make(depth=depth)
    executor = make(config)
    assert FakeRunner.calls == []  # nothing is loaded before start
    assert executor.start() is FACTS
    return executor, config


DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
def test_the_runner_gets_the_configuration_and_the_plans_in_order(depth: int) -> None:
    executor, config = started(depth)
    bitmask = GrammarBitmask(np.zeros(0, np.int32), np.zeros((0, 1), np.uint32), np.zeros(0, np.int32))
    futures = [run(executor, step, bitmask if step == 3 else None) for step in range(5)]
    assert executor.call("weights", {"x": 1}) == {"x": 1}
    assert [future.result().step for future in futures] == list(range(5))
    executor.close()
    calls = [call[:-1] for call in FakeRunner.calls]
    assert calls[0] == ("load", config)
    steps = [
        call for step in range(5) for call in (("forward", step), ("sample", step, bitmask if step == 3 else None))
    ]
    assert calls[1:] == [*steps, ("call", "weights", {"x": 1})]


@DEPTHS
def test_torch_is_imported_without_collections_and_the_model_loaded_with(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[bool] = []

    def attribute(name: str) -> Any:
        if name == "load_runner":
            enabled.append(gc.isenabled())
            return load
        raise AttributeError(name)

    def load(config: Config) -> tuple[FakeRunner, DeviceFacts]:
        enabled.append(gc.isenabled())
        return FakeRunner(), FACTS

    startup = ModuleType("tokserve.runner.startup")
    startup.__getattr__ = attribute  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "tokserve.runner.startup", startup)
    started(depth)[0].close()
    assert enabled == [False, True]


@DEPTHS
def test_forward_and_sample_alternate(depth: int) -> None:
    executor, _ = started(depth)
    with pytest.raises(RuntimeError, match="no forward pass"):
        executor.sample(None)
    executor.forward(plan_of([]))
    with pytest.raises(RuntimeError, match="not sampled from"):
        executor.forward(plan_of([]))
    with pytest.raises(RuntimeError, match="not sampled from"):
        executor.call("weights", {})
    executor.close()  # does not wait for a bitmask that never comes


@DEPTHS
def test_the_runner_is_used_in_one_thread(depth: int) -> None:
    executor, _ = started(depth)
    run(executor, 0).result()
    executor.call("x", {})
    executor.close()
    (thread,) = {call[-1] for call in FakeRunner.calls}
    assert (thread is threading.current_thread()) == (depth == 1)
    assert depth == 1 or not thread.is_alive()


def test_depth_one_has_computed_when_forward_returns() -> None:
    executor, _ = started(1)
    executor.forward(plan_of([]))
    assert FakeRunner.calls[-1][:2] == ("forward", 0)


@DEPTHS
def test_an_error_of_the_device_comes_with_the_result(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    monkeypatch.setattr(FakeRunner, "sample", lambda self, step, bitmask: FakeResult(result(0), OSError("lost")))
    executor, _ = started(depth)
    future = run(executor, 0)
    with pytest.raises(OSError, match="lost"):
        future.result()
    executor.close()


def test_depth_two_returns_before_the_plan_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    forward = FakeRunner.forward

    def slow(self: FakeRunner, plan: StepPlan) -> StepPlan:
        assert go.wait(120)
        return forward(self, plan)

    monkeypatch.setattr(FakeRunner, "forward", slow)
    executor, _ = started(2)
    first, second = run(executor, 0), run(executor, 1)
    assert not first.done() and not second.done()
    go.set()
    assert [first.result().step, second.result().step] == [0, 1]
    executor.close()


@DEPTHS
def test_an_error_of_the_runner_reaches_the_caller(depth: int) -> None:
    executor, _ = started(depth)
    with pytest.raises(ZeroDivisionError):
        run(executor, 13).result()
    executor.close()


@DEPTHS
def test_long_calls_run_in_order_in_a_thread(depth: int) -> None:
    executor, _ = started(depth)
    futures = [executor.background("stage", {"x": x}) for x in range(5)]
    run(executor, 0).result()
    assert [future.result() for future in futures] == [{"x": x} for x in range(5)]
    threads = {name: {c[-1] for c in FakeRunner.calls if c[0] == name} for name in ("background", "forward")}
    assert len(threads["background"]) == 1 and not threads["background"] & threads["forward"]
    executor.close()


@DEPTHS
def test_a_closed_executor_refuses(depth: int) -> None:
    executor, _ = started(depth)
    executor.close()
    with pytest.raises(RuntimeError, match="not started, or is closed"):
        executor.forward(plan_of([]))
