"""The scripted executor detects bugs that are put into scheduler and cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine.harness import Engine
from tests.engine.scripted_states import IllegalPlan
from tokserve.engine.kv_cache.block_pool import BlockPool
from tokserve.engine.kv_cache.block_table import BlockTable
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.protocol.plan import StepPlan

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
    allocate = PrefixCache.allocate

    def hasty(self: PrefixCache, table: BlockTable, tokens: array[int], hits: int, reserve: int) -> bool:
        done = allocate(self, table, tokens, hits, reserve)
        self.cache_full_blocks(table, tokens, len(tokens))
        return done

    monkeypatch.setattr(PrefixCache, "allocate", hasty)
    with pytest.raises(IllegalPlan, match=r"wrong prefix hit|shared block"):
        two_turns(max_num_batched_tokens=5)
    with pytest.raises(IllegalPlan, match="hit on a step in flight"):
        two_turns(depth=2, max_num_batched_tokens=12)


def test_a_hash_that_forgets_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def shallow(self: PrefixCache, table: BlockTable, tokens: array[int], count: int) -> None:
        table.hash_seed = self._hash_seed(table)
        table.hashes = [tokens[i * 4 : i * 4 + 4].tobytes() for i in range(count)]

    monkeypatch.setattr(PrefixCache, "_extend_hashes", shallow)
    engine = Engine()
    engine.add("a", [3] * 4 + [4] * 5, max_tokens=1)
    engine.run()
    engine.add("b", [4] * 4 + [5] * 5, max_tokens=1)
    with pytest.raises(IllegalPlan, match="wrong prefix hit"):
        engine.run()


def test_blocks_given_away_while_held(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = BlockPool.allocate

    def greedy(self: BlockPool, count: int) -> list[int] | None:
        return [0] if count == 1 else allocate(self, count)

    monkeypatch.setattr(BlockPool, "allocate", greedy)
    engine = Engine()
    for name in "ab":
        engine.add(name, [ord(name) % 20] * 6, max_tokens=9, ignore_eos=True)
    with pytest.raises(IllegalPlan, match=r"shared block|stale block|a block twice"):
        while engine.core.step():
            pass


def test_blocks_freed_while_a_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release_slot

    def rash(self: Scheduler, request: Request) -> None:
        steps, request.steps_in_flight = request.steps_in_flight, 0
        release(self, request)
        request.steps_in_flight = steps

    monkeypatch.setattr(Scheduler, "_release_slot", rash)
    engine = Engine(depth=2, num_blocks=8, context=32, max_num_seqs=2)
    for name in "ab":
        engine.add(name, [ord(name) % 20] * 6, max_tokens=24, ignore_eos=True)
    with pytest.raises(IllegalPlan, match="while a step in flight has it"):
        engine.run()


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
        (lambda p: {"num_tokens": p.num_tokens + 1}, "not sampled|no block|budget"),
        (lambda p: {"num_logits": 1 - p.num_logits}, "num_logits"),
        (lambda p: {"slots": np.zeros_like(p.slots)}, "two rows|nobody|starts at|no row"),
        (lambda p: {"blocks": []}, "no block"),
        (lambda p: {"blocks": [(s, f + 1, b) for s, f, b in p.blocks]}, "not the end"),
        (lambda p: {"freed": [5]}, "was not in use"),
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
        return msgspec.structs.replace(plan, **change(plan))

    monkeypatch.setattr(Scheduler, "schedule", wrong)
    with pytest.raises(IllegalPlan, match=message):
        engine.run()
