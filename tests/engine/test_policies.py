"""Order of requests."""

from __future__ import annotations

import random

import pytest

from tokserve.engine.policies import POLICIES
from tokserve.engine.queue import Queue
from tokserve.engine.request import Limits, Request
from tokserve.messages import Add, pack_ids
from tokserve.params import SamplingParams

LIMITS = Limits(64, 20, (1,), "raw")


def request(number: int, *, arrival: float = 0.0, priority: int = 0) -> Request:
    add = Add(f"r{number}", pack_ids([1]), SamplingParams(), 0, arrival=arrival, priority=priority)
    return Request(add, b"A", number, 0.0, LIMITS)


def order(policy: str, requests: list[Request]) -> list[str]:
    queue = Queue(POLICIES[policy])
    for each in requests:
        queue.add(each)
    return [each.rid for each in queue]


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
        made = request(number, arrival=rng.randrange(5), priority=rng.randrange(3))
        queue.add(made)
        inside.append(made)
        if rng.random() < 0.4:
            gone = inside.pop(rng.randrange(len(inside)))
            queue.remove(gone)
    inside.sort(key=POLICIES[policy])
    assert list(queue) == inside
    assert len(queue) == len(inside) and queue[3] is inside[3]
