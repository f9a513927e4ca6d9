"""Deadlines: of the whole request and of its time in the queue."""

from __future__ import annotations

import random

import pytest

from tests.engine.harness import Engine
from tests.engine.solo import engine_request
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.request import Request
from tokserve.features.fairness.deadlines import Deadlines
from tokserve.features.fairness.engine import Fairness

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
def test_past_its_deadline_a_request_ends_with_what_it_has(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", [3], max_tokens=60, ignore_eos=True, deadline_ms=2500)
    for _ in range(10):
        engine.step()
        engine.clock.now += 1
    assert (engine.finish("a").reason, engine.finish("a").detail) == ("deadline", "deadline")
    assert 1 <= len(engine.tokens("a")) <= 3
    assert engine.tokens("a") == engine.solo("a").tokens[: len(engine.tokens("a"))]
    engine.run()
    engine.check_empty()


def test_queue_timeout_ends_only_requests_that_were_never_admitted() -> None:
    engine = Engine(max_num_seqs=1)
    for name in "ab":
        engine.add(name, [3], max_tokens=5, ignore_eos=True, queue_timeout_ms=1500)
    for _ in range(8):
        engine.step()
        engine.clock.now += 1
    assert (engine.finish("b").reason, engine.finish("b").detail) == ("deadline", "queue_timeout")
    assert engine.tokens("b") == []
    engine.check_complete("a")
    engine.check_empty()


def test_sleep_is_bounded_by_the_nearest_deadline_that_still_counts() -> None:
    engine = Engine()
    assert engine.core.seconds_to_deadline() is None
    engine.add("a", [3], max_tokens=2, deadline_ms=7000, ignore_eos=True)
    engine.add("b", [3], max_tokens=2, deadline_ms=9000, queue_timeout_ms=3000, ignore_eos=True)
    assert engine.core.seconds_to_deadline() == pytest.approx(3.0)
    engine.step()
    assert engine.core.seconds_to_deadline() == pytest.approx(7.0)
    engine.clock.now += 2
    assert engine.core.seconds_to_deadline() == pytest.approx(5.0)
    engine.abort("a")
    assert engine.core.seconds_to_deadline() == pytest.approx(7.0)
    engine.run()
    assert engine.core.seconds_to_deadline() is None


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    engine = Engine()
    for number in range(200):
        engine.add(f"r{number}", [3], max_tokens=1, deadline_ms=10**9)
        engine.run()
    assert len(engine.feature(Fairness).deadlines) < 100


def test_forgetting_keeps_what_still_counts_in_order() -> None:
    rng, deadlines, live = random.Random(0), Deadlines(), []
    for number in range(300):
        spec = engine_request(f"r{number}", [1], deadline_ms=rng.randrange(1, 1000))
        request = Request(spec, owner=b"A", number=number, received=0.0, limits=Limits(64, 20, (1,), "raw"))
        deadlines.add(request)
        if rng.random() < 0.8:
            request.end("abort", "abort_user", 0.0)
        else:
            request.history.admitted = 0.0
            live.append((spec.options.deadline_ms, number))
    deadlines.tidy(len(live))
    assert len(deadlines) == len(live)
    late = [(request.number, which) for request, which in deadlines.passed(1.0)]
    assert late == [(number, "deadline") for _, number in sorted(live)]
