"""The order of requests; how much may wait, and when to retry."""

from __future__ import annotations

import random

import pytest

from tests.engine.solo import engine_request
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.queue import LONGEST_RETRY, POLICIES, Queue, QueueLimits
from tokserve.engine.request import Request

LIMITS = Limits(64, 20, (1,), "raw")


def request(number: int, *, arrival: float = 0.0, priority: int = 0) -> Request:
    spec = engine_request(f"r{number}", [1], arrival=arrival, priority=priority)
    return Request(spec, owner=b"A", number=number, received=0.0, limits=LIMITS)


def order(policy: str, requests: list[Request]) -> list[str]:
    queue = Queue(POLICIES[policy])
    for request in requests:
        queue.add(request)
    return [request.request_id for request in queue]


def test_fcfs_is_by_arrival_then_receipt() -> None:
    requests = [request(0, arrival=5, priority=-1), request(1, arrival=5), request(2, arrival=4)]
    assert order("fcfs", requests) == ["r2", "r0", "r1"]


def test_priority_is_by_priority_then_arrival_then_receipt() -> None:
    requests = [
        request(0, priority=1),
        request(1, arrival=2),
        request(2, arrival=1),
        request(3, arrival=1),
        request(4, arrival=9, priority=-1),
    ]
    assert order("priority", requests) == ["r4", "r2", "r3", "r1", "r0"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_queue_stays_in_order_through_random_changes(policy: str) -> None:
    rng = random.Random(0)
    queue, inside = Queue(POLICIES[policy]), []
    for number in range(200):
        added = request(number, arrival=rng.randrange(5), priority=rng.randrange(3))
        queue.add(added)
        inside.append(added)
        if rng.random() < 0.4:
            removed = inside.pop(rng.randrange(len(inside)))
            queue.remove(removed)
    inside.sort(key=POLICIES[policy])
    assert list(queue) == inside
    assert len(queue) == len(inside) and queue[3] is inside[3]


# --- limits ---


@pytest.mark.parametrize(("requests", "tokens"), [(3, None), (None, 100), (3, 100)])
def test_a_queue_has_limits_if_either_is_set(requests: int | None, tokens: int | None) -> None:
    assert QueueLimits(requests, tokens).active and not QueueLimits(None, None).active


def test_requests_that_would_wait_are_counted() -> None:
    limits = QueueLimits(2, None)
    limits.added(5)
    assert limits.excess([5], [], 0.0) is None
    assert limits.excess([5, 5], [5], 0.0) is None  # one of them need not wait
    actual = limits.excess([5, 5], [], 0.0)
    assert actual is not None and "3 requests would wait, and at most 2 may (--max-queued-requests)" in actual[0]
    assert actual.option == "max_queued_requests"
    assert actual[1] == 1  # no request has left the queue yet, so its rate is unknown
    limits.left(5)
    assert limits.excess([5, 5], [], 0.0) is None


def test_when_to_ask_again_follows_from_the_pace_of_those_that_left() -> None:
    limits = QueueLimits(None, 100)
    for moment in (1.0, 2.0):
        limits.added(40)
        limits.admitted(40, moment)
    limits.added(90)
    actual = limits.excess([60], [], 3.0)  # 50 too many, at 40 in two seconds
    assert actual is not None and "150 prompt tokens would wait, and at most 100 may (--max-queued-tokens)" in actual[0]
    assert actual[1] == 3 and actual.option == "max_queued_tokens"
    assert limits.excess([10], [], 3.0) is None and limits.excess([60], [60], 3.0) is None
    for length, seconds in ((11, 1), (10**6, LONGEST_RETRY)):
        actual = limits.excess([length], [], 3.0)
        assert actual is not None and actual[1] == seconds
