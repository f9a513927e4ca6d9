"""Requests in the order of a scheduling policy, and the limits on how many may wait.

A policy maps a request to a sort key; the last in this order is the first to be preempted.  It is chosen by name at
start-up, and a key must not depend on anything that changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tokserve.engine.request import Request

Key = tuple[float, float, int]
Policy = Callable[[Request], Key]

PACE = 64  # admissions by which the queue's speed is measured
LONGEST_RETRY = 60  # seconds


def fcfs(request: Request) -> Key:
    return (0, request.history.arrival, request.number)


def priority(request: Request) -> Key:
    """The key for the order by priority, lower first, then by arrival."""
    return (request.options.priority, request.history.arrival, request.number)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


class Queue:
    """Requests in the order of a policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._keys: list[Key] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order.  The queue must not be changed meanwhile."""
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        """Against the order.  The queue must not be changed meanwhile."""
        return reversed(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def order(self) -> Iterator[Request]:
        """Iterate in order.  Those that it yields may be removed meanwhile, no others."""
        index = 0
        while index < len(self._requests):
            request = self._requests[index]
            yield request
            if index < len(self._requests) and self._requests[index] is request:
                index += 1

    def add(self, request: Request) -> None:
        """Insert it in order."""
        key = self._policy(request)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        index = bisect_left(self._keys, self._policy(request))
        assert self._requests[index] is request
        del self._keys[index], self._requests[index]


class Excess(NamedTuple):
    """Why requests may not wait, after how many seconds to retry, and the option whose limit they would exceed."""

    message: str
    seconds: int
    option: str


class QueueLimits:
    """Limits on accepted requests that have had no slot so far: on their number, and on the tokens of their prompts;
    None: no limit."""

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self.requests = 0
        self.tokens = 0
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._admitted: deque[tuple[float, int]] = deque(maxlen=PACE)  # when, prompt tokens

    @property
    def active(self) -> bool:
        """Whether there is a limit."""
        return self._max_requests is not None or self._max_tokens is not None

    def added(self, length: int) -> None:
        """A request waits."""
        self.requests += 1
        self.tokens += length

    def admitted(self, length: int, now: float) -> None:
        """A request got its first slot."""
        self.left(length)
        self._admitted.append((now, length))

    def left(self, length: int) -> None:
        """A request waits no more."""
        self.requests -= 1
        self.tokens -= length

    def excess(self, lengths: Sequence[int], served: Sequence[int], now: float) -> Excess | None:
        """Why requests with prompts of these lengths may not wait too, if so.  `served`: the lengths of those, new or
        waiting, that need not wait."""
        requests = self.requests + len(lengths) - len(served)
        tokens = self.tokens + sum(lengths) - sum(served)
        if self._max_requests is not None and requests > self._max_requests:
            pace = [1 for _ in self._admitted]
            what = f"{requests} requests would wait, and at most {self._max_requests} may (--max-queued-requests)"
            seconds = self._seconds(requests - self._max_requests, pace, now)
            return Excess(f"the queue is full: {what}", seconds, "max_queued_requests")
        if self._max_tokens is not None and tokens > self._max_tokens:
            pace = [length for _, length in self._admitted]
            what = f"{tokens} prompt tokens would wait, and at most {self._max_tokens} may (--max-queued-tokens)"
            seconds = self._seconds(tokens - self._max_tokens, pace, now)
            return Excess(f"the queue is full: {what}", seconds, "max_queued_tokens")
        return None

    def _seconds(self, amount: int, pace: Sequence[int], now: float) -> int:
        """How long it takes until `amount` has left the queue, at its recent speed."""
        if len(pace) < 2:
            return 1
        speed = sum(pace[1:]) / max(now - self._admitted[0][0], 1e-3)
        return min(LONGEST_RETRY, max(1, math.ceil(amount / speed)))
