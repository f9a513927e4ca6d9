"""Fairness between clients: who is admitted next, and who is preempted.

The client with the fewest slots is next, then the one whose last turn was longest ago.  The policy orders the requests
of a client, and levels of priority stand above clients.  With one client all of this is the order of the policy.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest

from tokserve.engine.plan_builder import PlanBuilder
from tokserve.engine.queue import Policy, Queue
from tokserve.engine.request import Request, State
from tokserve.engine.scheduler import Scheduler
from tokserve.engine.sharing import IsIdle, Sharing

LINGER = 1.0  # seconds that steps stay short after the last one with several clients: a client comes back soon


class Shares:
    """What each client has: `present` requests, which have not ended, `running` ones with a slot, and when it had its
    last turn."""

    def __init__(self) -> None:
        self.present: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self._turns: dict[str, int] = {}
        self._turn = 0

    def added(self, request: Request) -> None:
        """Count a new request."""
        self.present[request.client] += 1

    def ended(self, request: Request) -> None:
        """A request has ended."""
        _subtract(self.present, request.client)
        if request.client not in self.present:
            self._turns.pop(request.client, None)

    def admitted(self, request: Request) -> None:
        """A request got a slot."""
        self.running[request.client] += 1
        self._turn += 1
        self._turns[request.client] = self._turn

    def left(self, request: Request) -> None:
        """A request gave up its slot."""
        _subtract(self.running, request.client)

    def rank(self, client: str) -> tuple[int, int]:
        """The order of clients that wait: the lowest is next."""
        return self.running[client], self._turns.get(client, 0)


def _subtract(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]


class FairQueue:
    """Requests without a slot.  Those that `order` yields may be removed meanwhile, no others."""

    def __init__(self, policy: Policy, shares: Shares) -> None:
        self._policy = policy
        self._shares = shares
        self._levels: dict[float, dict[str, Queue]] = {}  # by priority, by client
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, request: Request) -> None:
        """Let it wait."""
        clients = self._levels.setdefault(self._policy(request)[0], {})
        if request.client not in clients:
            clients[request.client] = Queue(self._policy)
        clients[request.client].add(request)
        self._size += 1

    def remove(self, request: Request) -> None:
        level = self._policy(request)[0]
        clients = self._levels[level]
        queue = clients[request.client]
        queue.remove(request)
        self._size -= 1
        if not queue:
            del clients[request.client]
            if not clients:
                del self._levels[level]

    def first_of_each(self) -> Iterator[Request]:
        """Each client's first request, of each level of priority."""
        for clients in self._levels.values():
            for queue in clients.values():
                yield queue[0]

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order in which they would be served if all of them were admitted at once."""
        return self.order(assume=True)

    def order(self, assume: bool = False) -> Iterator[Request]:
        """The next request; then, if it was removed, the next after its admission, else the one that follows it.
        `assume`: as if all were admitted, though none is removed."""
        for level in sorted(self._levels):
            indexes = {client: 0 for client in self._levels[level]}
            queues = dict(self._levels[level])
            heap = [(self._rank(client, 0), self._policy(queue[0]), client) for client, queue in queues.items()]
            heapq.heapify(heap)
            while heap:
                *_, client = heapq.heappop(heap)
                queue, index = queues[client], indexes[client]
                request = queue[index]
                yield request
                if index < len(queue) and queue[index] is request:
                    indexes[client] = index = index + 1
                if index < len(queue):
                    admitted = index if assume else 0
                    heapq.heappush(heap, (self._rank(client, admitted), self._policy(queue[index]), client))

    def _rank(self, client: str, admitted: int) -> tuple[int, int]:
        running, turn = self._shares.rank(client)
        return running + admitted, turn


class FairSharing(Sharing):
    """The clients that are present have equal parts of a step's tokens, and take turns; steps are short while there are
    several of them.

    The client with the fewest slots is next, and while it waits for a slot or for blocks, a client with at least two
    slots more gives up its last request's."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.shares = Shares()
        self.waiting: FairQueue = FairQueue(policy, self.shares)
        self._policy = policy
        self._contended = -math.inf  # when a step was last planned with several clients

    def added(self, request: Request) -> None:
        self.shares.added(request)

    def ended(self, request: Request) -> None:
        self.shares.ended(request)

    def admitted(self, request: Request) -> None:
        self.shares.admitted(request)

    def left(self, request: Request) -> None:
        self.shares.left(request)

    def builder(self, scheduler: Scheduler, now: float) -> PlanBuilder:
        budget = limit = scheduler.token_budget
        present, joint = self.shares.present, scheduler.joint_tokens
        is_contested = len(present) > 1
        if is_contested:
            self._contended = now
        if now - self._contended < LINGER:
            least = min(limit, scheduler.num_running + joint) if joint else 0
            budget = min(limit, max(len(present), scheduler.pace.max_tokens(limit), least))
        return PlanBuilder.of(budget, present, self._num_active(scheduler) if is_contested else 1)

    def _num_active(self, scheduler: Scheduler) -> int:
        """The clients with a request that the next step may compute: the others need no share of it."""
        active = {
            request.client
            for request in scheduler.running
            if not request.is_held and not (request.stalled and scheduler.is_idle(request))
        }
        active.update(request.client for request in self.waiting.first_of_each() if scheduler.may_enter(request))
        return len(active)

    def order(self, running: Iterable[Request], builder: PlanBuilder) -> list[Request]:
        """The requests of all clients in turns; of one client, the one whose last step is longest ago first."""
        if not builder.shares:
            return list(running)
        by_client: dict[str, list[Request]] = {}
        for request in sorted(running, key=lambda request: request.last_step):
            by_client.setdefault(request.client, []).append(request)
        turns = zip_longest(*by_client.values())
        return [request for turn in turns for request in turn if request is not None]

    def fill(self, scheduler: Scheduler, builder: PlanBuilder) -> None:
        rows = {row.request: row for row in builder.rows}
        for request in self.order(scheduler.running, builder):
            if not builder.budget:
                return
            row = rows.get(request)
            count = 0 if row is None else row.num_tokens
            missing = request.num_tokens - request.num_computed
            if request.state is not State.RUNNING or request.is_held:
                continue
            if missing > max(count, not request.prompt_only):
                room = count + builder.budget
                more = 0 if builder.held else scheduler.chunk(request, room, room) - count
                if more <= 0:
                    builder.held = builder.held or bool(request.joint)
                elif row is None:
                    builder.add(request, more)
                else:
                    builder.extend(row, more)
            elif row is None and missing == 1 and not request.prompt_only and not builder.short:
                idle = scheduler.is_idle(request) or request.num_tokens >= request.limit
                if not idle and scheduler.make_room(request, builder):
                    builder.add(request, 1)

    @property
    def is_contested(self) -> bool:
        return len(self.shares.present) > 1

    def slots(self) -> Counter[str]:
        return self.shares.running.copy()

    def choose_victim(self, running: Queue, is_idle: IsIdle) -> Request:
        """An idle one, else the last of the client with the most slots.  Where no client has two, the last of all: so
        the first of all always gets on."""
        most = max(self.shares.running.values())
        last: Request | None = None
        for request in reversed(running):
            if is_idle(request):
                return request
            if last is None and (most == 1 or self.shares.running[request.client] == most):
                last = request
        assert last is not None
        return last

    def choose_displaced(
        self, waiting: Request, running: Queue, slots: Mapping[str, int], is_idle: IsIdle
    ) -> Request | None:
        """An idle one, else one of the client with the most slots, if it has at least two more."""
        level = self._policy(waiting)[0]
        largest_share = max(slots, key=lambda client: slots[client], default="")
        owed = slots.get(largest_share, 0) > slots.get(waiting.client, 0) + 1
        last: Request | None = None
        for request in reversed(running):
            if is_idle(request):
                return request
            if last is None and owed and request.client == largest_share and self._policy(request)[0] >= level:
                last = request
        return last
