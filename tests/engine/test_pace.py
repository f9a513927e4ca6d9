"""Tokens of a step while several clients are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.test_drafter import Fixed
from tests.tiers import slow_after
from tokserve.engine.pace import MAX_SLOWDOWN, SMALL, StepPace
from tokserve.engine.request import Request
from tokserve.features.fairness.sharing import LINGER
from tokserve.protocol.plan import StepPlan


def measured(fixed: float, per_token: float, *sizes: int) -> StepPace:
    pace = StepPace()
    for size in sizes:
        for _ in range(50):
            pace.record(size, fixed + per_token * size)
    return pace


def test_nothing_measured_is_no_bound() -> None:
    assert StepPace().max_tokens(2048) == 2048


def test_a_stopped_clock_is_no_bound() -> None:
    assert measured(0.0, 0.0, 1, 64, 2048).max_tokens(2048) == 2048


def test_a_time_below_zero_does_not_count() -> None:
    pace = StepPace()
    pace.record(1, -0.01)
    pace.record(64, 0.1)
    assert pace.max_tokens(2048) == SMALL
    pace = measured(0.001, 0.0001, 1, 32)
    before = pace.max_tokens(2048), pace.tokens_per_second()
    pace.record(1, -5.0)
    pace.record(32, -5.0)
    assert (pace.max_tokens(2048), pace.tokens_per_second()) == before


def test_without_a_small_step_the_next_is_small() -> None:
    assert measured(0.001, 0.0001, 64, 2048).max_tokens(2048) == SMALL


def test_the_bound_is_a_multiple_of_a_small_step() -> None:
    fixed, per_token = 0.001, 0.0001
    pace = measured(fixed, per_token, 1, 2, 4, 8, 16, 32, 64, 128, 256)
    tokens = pace.max_tokens(2048)
    assert SMALL <= tokens < 64
    assert fixed + per_token * tokens <= MAX_SLOWDOWN * (fixed + per_token) * 1.05


def test_where_a_token_costs_little_the_step_may_be_large() -> None:
    assert measured(0.03, 0.00001, 1, 8, 64, 256, 2048).max_tokens(2048) == 2048


def test_a_size_measured_while_the_machine_was_busy_is_measured_again() -> None:
    pace = measured(0.03, 0.00001, 1, 8, 64)
    pace.record(128, 100.0)
    assert 128 <= pace.max_tokens(2048) < 256


def test_no_bound_is_below_the_smallest() -> None:
    assert measured(0.0, 0.001, 1, 2, 4, 8, 16, 32).max_tokens(2048) == SMALL
    assert measured(0.0, 0.001, 1, 2, 4, 8, 16, 32).max_tokens(4) == 4


class TimedEngine(Engine):
    """An engine whose steps take a time, and a tenth of that for each token."""

    STEP = LINGER / 100  # seconds

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        forward = self.executor.forward

        def timed(plan: StepPlan) -> None:
            self.clock.now += self.STEP * (1.0 + 0.1 * int(plan.num_tokens.sum()))
            forward(plan)

        self.executor.forward = timed  # type: ignore[method-assign]


def loaded(**options: Any) -> TimedEngine:
    """An engine that knows small steps, with 40 decoding requests and long prompts of one client."""
    engine = TimedEngine(
        num_blocks=1200,
        context=256,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        **options,
    )
    engine.add("first", [3], max_tokens=30, ignore_eos=True, client="light")
    engine.run()
    for i in range(40):
        engine.add(f"h{i}", [3, i % 20], max_tokens=200, ignore_eos=True, client="heavy", seed=i)
    engine.steps(10)
    for i in range(4):
        engine.add(f"p{i}", [i % 20] * 200, max_tokens=2, ignore_eos=True, client="heavy", seed=i)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("depth", slow_after([2, 1], 1))
def test_steps_are_short_while_a_second_client_is_served(depth: int) -> None:
    engine = loaded(depth=depth)
    before = len(engine.executor.plans)
    engine.add("light", [5, 6, 7], max_tokens=20, ignore_eos=True, client="light")
    slot = None
    rows, largest = 0, 0
    while not engine.received.get("light") or engine.received["light"].finish is None:
        engine.step()
    for plan in engine.executor.plans[before:]:
        entered = [row.slot for row in plan.new if row.request_id == "light"]
        slot = entered[0] if entered else slot
        rows += slot in plan.slots.tolist()
        if slot is not None:
            largest = max(largest, int(plan.num_tokens.sum()))
    assert 20 <= rows <= 20 + depth, "a step left the light client out"
    assert SMALL <= largest <= 32, "512 may be computed in a step, but 3 times the time of a small one is less"
    engine.run()
    for request_id in engine.requests:
        engine.check_complete(request_id)


def test_the_heavy_client_takes_turns_among_its_own_requests() -> None:
    engine = loaded()
    before = len(engine.executor.plans)
    engine.add("light", [5, 6, 7], max_tokens=40, ignore_eos=True, client="light")
    engine.steps(40)
    steps = Counter(slot for plan in engine.executor.plans[before + 1 :] for slot in plan.slots.tolist())
    assert len(steps) > 40 and min(steps.values()) >= 5, "a request got no turn"


@pytest.mark.slow
def test_drafts_within_the_share_of_a_client_come_before_what_exceeds_the_shares() -> None:
    engine = loaded()
    engine.draft_with(Fixed(engine, right=16))
    before = len(engine.executor.plans)
    engine.add("light", [5, 6, 7], max_tokens=20, ignore_eos=True, client="light")
    while not engine.received.get("light") or engine.received["light"].finish is None:
        engine.step()
    assert len(engine.executor.plans) - before <= 5, "20 tokens, of which a share has at least 8 a step"
    engine.run()
    for request_id in engine.requests:
        engine.check_complete(request_id)


def steps_of_light(engine: TimedEngine) -> int:
    """Steps until a request for 20 tokens has ended."""
    before = len(engine.executor.plans)
    engine.add("light", [5, 6, 7], max_tokens=20, ignore_eos=True, client="light")
    while not engine.received.get("light") or engine.received["light"].finish is None:
        engine.step()
    return len(engine.executor.plans) - before


@pytest.mark.slow
def test_requests_that_enter_beyond_the_share_of_their_client_leave_drafts_their_place() -> None:
    engine = TimedEngine(num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=16, enable_prefix_caching=False)
    for i in range(600):
        engine.add(f"h{i}", [i % 20], max_tokens=1, ignore_eos=True, client="heavy", seed=i)
    engine.steps(2)
    engine.draft_with(Fixed(engine, right=16))
    assert steps_of_light(engine) <= 5, "a share has 8 tokens a step"
    assert all(int(plan.num_tokens.sum()) == 16 for plan in engine.executor.plans[3:8]), "budget was wasted"
    engine.run()


class Likeliest(Fixed):
    """Gives the drafts of a call to the first requests that have some, as many as the largest limit."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[list[int]]:
        left, proposals = max(limits), []
        for request, limit in zip(requests, limits, strict=True):
            proposals.append(self.propose_one(request, limit)[: min(left, limit)])
            left -= len(proposals[-1])
        return proposals


def test_the_drafts_of_one_client_do_not_take_the_place_of_anothers() -> None:
    engine = TimedEngine(num_blocks=1200, max_num_seqs=8, max_num_batched_tokens=32)
    for i in range(3):
        engine.add(f"h{i}", [3, i], max_tokens=50, ignore_eos=True, client="heavy", seed=i)
    engine.steps(2)
    engine.draft_with(Likeliest(engine, right=16))
    assert steps_of_light(engine) <= 4
    engine.run()
    for request_id in engine.requests:
        engine.check_complete(request_id)


def test_clients_that_compute_nothing_need_no_share() -> None:
    engine = loaded()
    for i in range(6):
        engine.add(f"s{i}", [3, i], max_tokens=50, ignore_eos=True, client=f"stalled {i}")
    engine.steps(8)
    engine.stall(*(f"s{i}" for i in range(6)))
    engine.draft_with(Fixed(engine, right=16))
    before = len(engine.executor.plans)
    engine.add("light", [5, 6, 7], max_tokens=20, ignore_eos=True, client="light")
    while not engine.received.get("light") or engine.received["light"].finish is None:
        engine.step()
    assert len(engine.executor.plans) - before <= 5


def test_steps_stay_short_for_a_client_that_returns_soon() -> None:
    engine = loaded()
    engine.add("light", [5, 6, 7], max_tokens=4, ignore_eos=True, client="light")
    while not engine.received.get("light") or engine.received["light"].finish is None:
        engine.step()
    before, end = len(engine.executor.plans), engine.clock.now + LINGER
    while engine.clock.now < end:
        engine.step()
    assert max(int(plan.num_tokens.sum()) for plan in engine.executor.plans[before:-1]) <= 32
    before = len(engine.executor.plans)
    for i in range(4):
        engine.add(f"q{i}", [i, *range(19)] * 9, max_tokens=2, ignore_eos=True, client="heavy", seed=i)
    engine.steps(3)
    assert max(int(plan.num_tokens.sum()) for plan in engine.executor.plans[before:]) > 400


def test_one_client_alone_may_fill_every_step() -> None:
    engine = loaded()
    engine.steps(3)
    assert max(int(plan.num_tokens.sum()) for plan in engine.executor.plans) > 400
