"""The scripted executor notices what it is there to notice: bugs put into scheduler and cache on purpose."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.scripted import Engine, IllegalPlan
from tokserve.engine.blocks import BlockPool
from tokserve.engine.cache import Cache, Table
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.plan import StepPlan

PROMPT = list(range(12))


def two_turns(**options: Any) -> Engine:
    engine = Engine(**options)
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=9, ignore_eos=True, seed=ord(name))
    engine.steps(2)
    engine.add("c", [*PROMPT, 7, 7, 7, 7, 7], max_tokens=9, ignore_eos=True)
    engine.run()
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sound_engine_passes(depth: int) -> None:
    engine = two_turns(depth=depth, max_num_batched_tokens=5)
    for name in "abc":
        engine.check_complete(name)


def test_blocks_published_before_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Cache.admit

    def hasty(self: Cache, table: Table, tokens: array[int], hits: int, spare: int) -> bool:
        done = admit(self, table, tokens, hits, spare)
        self.settle(table, tokens, len(tokens))
        return done

    monkeypatch.setattr(Cache, "admit", hasty)
    with pytest.raises(IllegalPlan, match=r"wrong prefix hit|shared block"):
        two_turns(max_num_batched_tokens=5)
    with pytest.raises(IllegalPlan, match="hit on a step in flight"):
        two_turns(depth=2, max_num_batched_tokens=12)


def test_a_hash_that_forgets_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def shallow(self: Cache, table: Table, tokens: array[int], count: int) -> None:
        table.origin = self._origin(table)
        table.digests = [tokens[i * 4 : i * 4 + 4].tobytes() for i in range(count)]

    monkeypatch.setattr(Cache, "_extend", shallow)
    engine = Engine()
    engine.add("a", [3] * 4 + [4] * 5, max_tokens=1)
    engine.run()
    engine.add("b", [4] * 4 + [5] * 5, max_tokens=1)
    with pytest.raises(IllegalPlan, match="wrong prefix hit"):
        engine.run()


def test_blocks_given_away_while_held(monkeypatch: pytest.MonkeyPatch) -> None:
    take_new = BlockPool.take_new

    def greedy(self: BlockPool, count: int) -> list[int] | None:
        return [0] if count == 1 else take_new(self, count)

    monkeypatch.setattr(BlockPool, "take_new", greedy)
    engine = Engine()
    for name in "ab":
        engine.add(name, [ord(name) % 20] * 6, max_tokens=9, ignore_eos=True)
    with pytest.raises(IllegalPlan, match=r"shared block|stale block|a block twice"):
        while engine.core.step():
            pass


def test_blocks_freed_while_a_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Scheduler._leave

    def rash(self: Scheduler, request: Request) -> None:
        flying, request.in_flight = request.in_flight, 0
        leave(self, request)
        request.in_flight = flying

    monkeypatch.setattr(Scheduler, "_leave", rash)
    engine = Engine(depth=2, num_blocks=8, context=32, max_num_seqs=2)
    for name in "ab":
        engine.add(name, [ord(name) % 20] * 6, max_tokens=24, ignore_eos=True)
    with pytest.raises((IllegalPlan, AssertionError, IndexError)):
        engine.run()
        for name in "ab":
            engine.check_complete(name)


def test_a_full_hit_that_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "reusable", property(lambda self: len(self.tokens) - 2))
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    engine.add("b", PROMPT, max_tokens=1)
    engine.run()  # one position more than needed: legal
    monkeypatch.setattr(Request, "reusable", property(lambda self: len(self.tokens)))
    engine.add("c", PROMPT, max_tokens=1)
    with pytest.raises((IllegalPlan, AssertionError)):
        engine.run()


Change = Callable[[StepPlan], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"num_computed": p.num_computed + 1, "num_tokens": p.num_tokens - 1}, "wrong prefix hit"),
        (lambda p: {"num_tokens": p.num_tokens + 1}, "nobody has drawn|no block|budget"),
        (lambda p: {"samples": ~p.samples}, "samples"),
        (lambda p: {"slots": np.zeros_like(p.slots)}, "two rows|nobody|starts at|no row"),
        (lambda p: {"blocks": []}, "no block"),
        (lambda p: {"blocks": [(s, f + 1, b) for s, f, b in p.blocks]}, "not the end"),
        (lambda p: {"done": [5]}, "nobody was in it"),
        (lambda p: {"new": p.new * 2}, "is taken"),
        (lambda p: {"step": p.step + 1}, "numbered"),
        (lambda p: {"slots": p.slots.astype(np.int64)}, "column types"),
    ],
)
def test_malformed_plans(monkeypatch: pytest.MonkeyPatch, change: Change, message: str) -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name, [ord(name) % 20] * 6, max_tokens=30, ignore_eos=True)
    schedule = Scheduler.schedule

    def wrong(self: Scheduler, now: float) -> StepPlan | None:
        plan = schedule(self, now)
        assert plan is not None
        return replace(plan, **change(plan))

    monkeypatch.setattr(Scheduler, "schedule", wrong)
    with pytest.raises(IllegalPlan, match=message):
        engine.run()
