"""Who is next among several clients: the one with the fewest slots, then the one whose last turn was longest ago.

The policy orders the requests of a client, and levels of priority stand above clients.  With one client all of this
is the order of the policy.  Knows neither blocks nor budgets.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from tokserve.engine.policies import Policy
from tokserve.engine.queue import Queue
from tokserve.engine.request import Request


class Shares:
    """What each client has: `live` requests, `running` ones with a slot, and when it had its last turn."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self._turns: dict[str, int] = {}
        self._turn = 0

    def came(self, client: str) -> None:
        """A request is live."""
        self.live[client] += 1

    def ended(self, client: str) -> None:
        """A request has ended."""
        self.live[client] -= 1
        if not self.live[client]:
            del self.live[client]
            self._turns.pop(client, None)

    def entered(self, client: str) -> None:
        """A request got a slot."""
        self.running[client] += 1
        self._turn += 1
        self._turns[client] = self._turn

    def left(self, client: str) -> None:
        """A request gave up its slot."""
        self.running[client] -= 1
        if not self.running[client]:
            del self.running[client]

    def rank(self, client: str) -> tuple[int, int]:
        """The lowest is next."""
        return self.running[client], self._turns.get(client, 0)


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
        """Take out a request that is in the queue."""
        level = self._policy(request)[0]
        clients = self._levels[level]
        queue = clients[request.client]
        queue.remove(request)
        self._size -= 1
        if not queue:
            del clients[request.client]
            if not clients:
                del self._levels[level]

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be served if all of them entered at once."""
        return self.order(assume=True)

    def order(self, assume: bool = False) -> Iterator[Request]:
        """The next request; then, if it was removed, the next after it has entered, and else the one that follows it.
        `assume`: each enters, and none is removed."""
        for level in sorted(self._levels):
            places = {client: 0 for client in self._levels[level]}
            queues = dict(self._levels[level])
            heap = [(self._rank(client, 0), self._policy(queue[0]), client) for client, queue in queues.items()]
            heapq.heapify(heap)
            while heap:
                *_, client = heapq.heappop(heap)
                queue, place = queues[client], places[client]
                request = queue[place]
                yield request
                if place < len(queue) and queue[place] is request:
                    places[client] = place = place + 1
                if place < len(queue):
                    entered = place if assume else 0
                    heapq.heappush(heap, (self._rank(client, entered), self._policy(queue[place]), client))

    def _rank(self, client: str, entered: int) -> tuple[int, int]:
        running, turn = self._shares.rank(client)
        return running + entered, turn
