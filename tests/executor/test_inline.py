"""The inline executor: which thread the runner lives in, order, and errors; with a runner that only remembers."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tokserve.config import Config
from tokserve.executor.base import Executor, make
from tokserve.plan import DeviceFacts, KVLayout, StepPlan, StepResult

FACTS = DeviceFacts(KVLayout((), 1, 16), 10, "0", {})


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

    def execute(self, plan: StepPlan) -> StepResult:
        self._remember("execute", plan.step)
        if plan.step == 13:
            raise ZeroDivisionError
        return StepResult(plan.step, np.zeros(0, np.int32), np.zeros(0, np.bool_))

    def call(self, method: str, args: dict[str, Any]) -> Any:
        self._remember("call", method, args)
        return args


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
    assert what[:2] == [("init", config.model, config.cache, config.scheduler, config.runtime), ("load",)]
    assert what[2:] == [*(("execute", step) for step in range(5)), ("call", "weights", {"x": 1})]


@DEPTHS
def test_all_of_the_runners_life_is_in_one_thread(depth: int) -> None:
    executor, _ = started(depth)
    executor.submit(plan(0)).result()
    executor.call("x", {})
    executor.close()
    (thread,) = {call[-1] for call in FakeRunner.calls}
    assert (thread is threading.current_thread()) == (depth == 1)
    assert depth == 1 or not thread.is_alive()


def test_depth_one_has_run_when_submit_returns() -> None:
    executor, _ = started(1)
    assert executor.submit(plan(0)).done()


def test_depth_two_returns_before_the_plan_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    execute = FakeRunner.execute

    def slow(self: FakeRunner, plan: StepPlan) -> StepResult:
        assert go.wait(20)
        return execute(self, plan)

    monkeypatch.setattr(FakeRunner, "execute", slow)
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
def test_a_closed_executor_refuses(depth: int) -> None:
    executor, _ = started(depth)
    executor.close()
    with pytest.raises(RuntimeError, match="not started, or is closed"):
        executor.submit(plan(0))
