"""In which order requests get to run; the last in this order is the first to be preempted.

A policy is a function from a request to its place, and places are compared.  It is chosen by name at start-up
and must not depend on anything that changes.
"""

from __future__ import annotations

from collections.abc import Callable

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
