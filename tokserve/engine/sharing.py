"""`Sharing`: in which order requests wait, who gives up slots and blocks, and how a step's budget is divided.

This one knows no clients: the policy orders all requests alike.  A room may have another one that divides slots and
tokens between clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from tokserve.engine.plan_builder import PlanBuilder
from tokserve.engine.queue import Policy, Queue
from tokserve.engine.request import Request

if TYPE_CHECKING:
    from tokserve.engine.scheduler import Scheduler

MAX_DISPLACED = 8  # preemptions per step in favour of other requests

IsIdle = Callable[[Request], bool]


class WaitingQueue(Protocol):
    """Requests without a slot."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def add(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def order(self) -> Iterator[Request]:
        """The next request, again and again.  Those that it yields may be removed meanwhile, no others."""


class Sharing:
    """Serves requests by a policy, whatever their client.  `waiting`: those without a slot."""

    waiting: WaitingQueue

    def __init__(self, policy: Policy) -> None:
        self.waiting = Queue(policy)

    def added(self, request: Request) -> None:
        """A request is new."""

    def ended(self, request: Request) -> None:
        """A request has ended."""

    def admitted(self, request: Request) -> None:
        """A request got a slot."""

    def left(self, request: Request) -> None:
        """A request gave up its slot."""

    def builder(self, scheduler: Scheduler, now: float) -> PlanBuilder:
        """The empty plan of the next step, with its budget."""
        return PlanBuilder(scheduler.token_budget)

    def order(self, running: Iterable[Request], builder: PlanBuilder) -> list[Request]:
        """The order in which running requests get their part of the budget."""
        return list(running)

    def fill(self, scheduler: Scheduler, builder: PlanBuilder) -> None:
        """Give what is left of a divided budget to requests that exceed their part."""

    @property
    def is_contested(self) -> bool:
        """Whether requests that run may have to give way to some that wait."""
        return False

    def slots(self) -> Counter[str]:
        """A copy of the number of slots by client."""
        return Counter()

    def choose_victim(self, running: Queue, is_idle: IsIdle) -> Request:
        """Which running request gives up its blocks to another: an idle one, else the last."""
        return next(filter(is_idle, reversed(running)), running[-1])

    def choose_displaced(
        self, waiting: Request, running: Queue, slots: Mapping[str, int], is_idle: IsIdle
    ) -> Request | None:
        """Which running request gives up its slot and blocks to one that waits: an idle one.  `slots`: by client."""
        return next(filter(is_idle, reversed(running)), None)
