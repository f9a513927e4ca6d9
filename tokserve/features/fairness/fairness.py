"""Fairness between clients: who is admitted next, and who is preempted.

The client with the fewest slots is next, then the one whose last turn was longest ago.  The policy orders the requests
of a client, and levels of priority stand above clients.  With one client all of this is the order of the policy.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from operator import attrgetter

from tokserve.engine.queue import Policy, Queue
from tokserve.engine.request import Request


class Shares:
    """What each client has: `live` requests, `running` ones with a slot, and when it had its last turn.  `present`:
    live requests by share."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.present: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self._turns: dict[str, int] = {}
        self._turn = 0

    def added(self, request: Request) -> None:
        """Count a new request."""
        self.live[request.client] += 1
        self.present[request.share] += 1

    def ended(self, request: Request) -> None:
        """A request has ended."""
        _subtract(self.live, request.client)
        _subtract(self.present, request.share)
        if request.share not in self.present:
            self._turns.pop(request.share, None)

    def admitted(self, request: Request) -> None:
        """A request got a slot."""
        self.running[request.share] += 1
        self._turn += 1
        self._turns[request.share] = self._turn

    def left(self, request: Request) -> None:
        """A request gave up its slot."""
        _subtract(self.running, request.share)

    def round_robin(self, requests: Iterable[Request]) -> list[Request]:
        """The requests of all clients in turns; of one client, the one whose last step is longest ago first."""
        by_client: dict[str, list[Request]] = {}
        for request in sorted(requests, key=_last_step):
            by_client.setdefault(request.share, []).append(request)
        turns = zip_longest(*by_client.values())
        return [request for turn in turns for request in turn if request is not None]

    def rank(self, share: str) -> tuple[int, int]:
        """The order of clients that wait: the lowest is next."""
        return self.running[share], self._turns.get(share, 0)


_last_step = attrgetter("last_step")


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
        if request.share not in clients:
            clients[request.share] = Queue(self._policy)
        clients[request.share].add(request)
        self._size += 1

    def remove(self, request: Request) -> None:
        level = self._policy(request)[0]
        clients = self._levels[level]
        queue = clients[request.share]
        queue.remove(request)
        self._size -= 1
        if not queue:
            del clients[request.share]
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


def choose_victim(running: Queue, shares: Shares, is_idle: Callable[[Request], bool]) -> Request:
    """Which running request gives up its blocks to another: an idle one, else the last of the client with the most
    slots.  Where no client has two, the last of all: so the first of all always gets on."""
    most = max(shares.running.values())
    last: Request | None = None
    for request in reversed(running):
        if is_idle(request):
            return request
        if last is None and (most == 1 or shares.running[request.share] == most):
            last = request
    assert last is not None
    return last


def choose_displaced(
    waiting: Request, running: Queue, slots: Mapping[str, int], policy: Policy, is_idle: Callable[[Request], bool]
) -> Request | None:
    """Which running request gives up its slot and blocks to a waiting one: an idle one, else one of the client with the
    most slots, if it has at least two more.  `slots`: by client."""
    level = policy(waiting)[0]
    largest_share = max(slots, key=lambda share: slots[share], default="")
    owed = slots.get(largest_share, 0) > slots.get(waiting.share, 0) + 1
    last: Request | None = None
    for request in reversed(running):
        if is_idle(request):
            return request
        if last is None and owed and request.share == largest_share and policy(request)[0] >= level:
            last = request
    return last
