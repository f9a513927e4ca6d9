"""How much may wait, and when to ask again."""

from __future__ import annotations

import pytest

from tokserve.engine.queue import LONGEST_RETRY, QueueLimits


@pytest.mark.parametrize(("requests", "tokens"), [(3, None), (None, 100), (3, 100)])
def test_a_queue_has_limits_if_either_is_set(requests: int | None, tokens: int | None) -> None:
    assert QueueLimits(requests, tokens).active and not QueueLimits(None, None).active


def test_requests_that_would_wait_are_counted() -> None:
    limits = QueueLimits(2, None)
    limits.entered(5)
    assert limits.excess([5], [], 0.0) is None
    assert limits.excess([5, 5], [5], 0.0) is None  # one of them need not wait
    found = limits.excess([5, 5], [], 0.0)
    assert found is not None and "3 requests would wait, and at most 2 may (--max-queued-requests)" in found[0]
    assert found[1] == 1  # nobody has left yet, so nothing is known of the pace
    limits.gone(5)
    assert limits.excess([5, 5], [], 0.0) is None


def test_when_to_ask_again_follows_from_the_pace_of_those_that_left() -> None:
    limits = QueueLimits(None, 100)
    for moment in (1.0, 2.0):
        limits.entered(40)
        limits.left(40, moment)
    limits.entered(90)
    found = limits.excess([60], [], 3.0)  # 50 too many, at 40 in two seconds
    assert found is not None and "150 prompt tokens would wait, and at most 100 may (--max-queued-tokens)" in found[0]
    assert found[1] == 3
    assert limits.excess([10], [], 3.0) is None and limits.excess([60], [60], 3.0) is None
    for length, seconds in ((11, 1), (10**6, LONGEST_RETRY)):
        found = limits.excess([length], [], 3.0)
        assert found is not None and found[1] == seconds
