"""The inline executor: which thread the runner lives in, order, and errors; with a runner that only remembers."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tokserve.config import Config
from tokserve.executor.base import Executor, make
from tokserve.kv_spec import KVLayout
from tokserve.plan import DeviceFacts, StepPlan, StepResult

FACTS = DeviceFacts(KVLayout((), 1, 16), 10, "0", {})


@dataclass
class FakeFlight:
    """A step that has begun; `late` says why its result never comes."""

    value: StepResult
    late: Exception | None = None

    def result(self) -> StepResult:
        if self.late is not None:
            raise self.late
        return self.value


class FakeRunner:
    """Remembers what was called, in which thread."""

    calls: list[tuple[Any, ...]] = []

    def __init__(self, *groups: Any) -> None:
        self._remember("init", *groups)

    def _remember(self, *what: Any) -> None:
        FakeRunner.calls.append((*what, threading.current_thread()))

    def load(self) -> DeviceFacts:
        self._remember("load")
        return FACTS

    def launch(self, plan: StepPlan) -> FakeFlight:
        self._remember("launch", plan.step)
        if plan.step == 13:
            raise ZeroDivisionError
        return FakeFlight(StepResult(plan.step, np.zeros(0, np.int32), np.zeros(0, np.bool_)))

    def call(self, method: str, args: dict[str, Any]) -> Any:
        self._remember("call", method, args)
        return args

    def background(self, method: str, args: dict[str, Any]) -> Any:
        self._remember("background", method, args)
        return args

    def interrupt(self) -> None:
        """Nothing waits here."""


def plan(step: int) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(step, none, none, none, np.zeros(0, np.bool_))


@pytest.fixture(autouse=True)
def runner(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tokserve.runner.runner")
    module.Runner = FakeRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokserve.runner.runner", module)
    monkeypatch.setattr(FakeRunner, "calls", [])


def started(depth: int) -> tuple[Executor, Config]:
    config = Config.make(depth=depth)
    executor = make(config)
    assert FakeRunner.calls == []  # nothing is loaded before start
    assert executor.start() is FACTS
    return executor, config


DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
def test_the_runner_gets_its_groups_and_the_plans_in_order(depth: int) -> None:
    executor, config = started(depth)
    futures = [executor.submit(plan(step)) for step in range(5)]
    assert executor.call("weights", {"x": 1}) == {"x": 1}
    assert [future.result().step for future in futures] == list(range(5))
    executor.close()
    what = [call[:-1] for call in FakeRunner.calls]
    assert what[:2] == [
        ("init", config.model, config.cache, config.scheduler, config.runtime, config.weights, config.lora),
        ("load",),
    ]
    assert what[2:] == [*(("launch", step) for step in range(5)), ("call", "weights", {"x": 1})]


@DEPTHS
def test_all_of_the_runners_life_is_in_one_thread(depth: int) -> None:
    executor, _ = started(depth)
    executor.submit(plan(0)).result()
    executor.call("x", {})
    executor.close()
    (thread,) = {call[-1] for call in FakeRunner.calls}
    assert (thread is threading.current_thread()) == (depth == 1)
    assert depth == 1 or not thread.is_alive()


def test_depth_one_has_begun_when_submit_returns() -> None:
    executor, _ = started(1)
    executor.submit(plan(0))
    assert FakeRunner.calls[-1][:2] == ("launch", 0)


@DEPTHS
def test_an_error_of_the_device_comes_with_the_result(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    flight = FakeFlight(StepResult(0, np.zeros(0, np.int32), np.zeros(0, np.bool_)), OSError("lost"))
    monkeypatch.setattr(FakeRunner, "launch", lambda self, plan: flight)
    executor, _ = started(depth)
    future = executor.submit(plan(0))
    with pytest.raises(OSError, match="lost"):
        future.result()
    executor.close()


def test_depth_two_returns_before_the_plan_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    launch = FakeRunner.launch

    def slow(self: FakeRunner, plan: StepPlan) -> FakeFlight:
        assert go.wait(20)
        return launch(self, plan)

    monkeypatch.setattr(FakeRunner, "launch", slow)
    executor, _ = started(2)
    first, second = executor.submit(plan(0)), executor.submit(plan(1))
    assert not first.done() and not second.done()
    go.set()
    assert [first.result().step, second.result().step] == [0, 1]
    executor.close()


@DEPTHS
def test_an_error_of_the_runner_reaches_the_caller(depth: int) -> None:
    executor, _ = started(depth)
    with pytest.raises(ZeroDivisionError):
        executor.submit(plan(13)).result()
    executor.close()


@DEPTHS
def test_long_calls_run_in_order_beside_the_steps(depth: int) -> None:
    executor, _ = started(depth)
    futures = [executor.background("stage", {"x": x}) for x in range(5)]
    executor.submit(plan(0)).result()
    assert [future.result() for future in futures] == [{"x": x} for x in range(5)]
    threads = {name: {c[-1] for c in FakeRunner.calls if c[0] == name} for name in ("background", "execute")}
    assert len(threads["background"]) == 1 and not threads["background"] & threads["execute"]
    executor.close()


@DEPTHS
def test_a_closed_executor_refuses(depth: int) -> None:
    executor, _ = started(depth)
    executor.close()
    with pytest.raises(RuntimeError, match="not started, or is closed"):
        executor.submit(plan(0))
