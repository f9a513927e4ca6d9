"""In which order requests get to run; the last in this order is the first to be preempted.

A policy is a function from a request to its place, and places are compared.  It is chosen by name at start-up
and must not depend on anything that changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from tokserve.engine.request import Request

Place = tuple[float, float, int]
Policy = Callable[[Request], Place]


def fcfs(request: Request) -> Place:
    """By arrival."""
    return (0, request.arrival, request.number)


def priority(request: Request) -> Place:
    """By priority, lower first, then by arrival."""
    return (request.priority, request.arrival, request.number)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


class Queue:
    """Requests in the order of a policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._places: list[Place] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order.  The queue must not be changed meanwhile."""
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        """Put it in its place."""
        place = self._policy(request)
        index = bisect_left(self._places, place)
        self._places.insert(index, place)
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        index = bisect_left(self._places, self._policy(request))
        assert self._requests[index] is request
        del self._places[index], self._requests[index]
