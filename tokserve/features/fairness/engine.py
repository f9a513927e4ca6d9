"""Clients that share an engine, as its loop sees them: how many requests they may have, and how long each may take."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.queue import POLICIES
from tokserve.engine.request import Request
from tokserve.features.fairness.deadlines import Deadlines
from tokserve.features.fairness.sharing import FairSharing
from tokserve.protocol.messages import Submit, SubmitReply


class Fairness(EngineFeature):
    """Counts the `live` requests of each client, and ends requests that are past a deadline, with what they have.
    `sharing`: how the scheduler divides slots and tokens between clients, unless an option turns that off."""

    def __init__(self, context: EngineContext) -> None:
        config = context.config.scheduler
        self.live: Counter[str] = Counter()
        self.deadlines = Deadlines()
        self.sharing: FairSharing | None = None
        if config.fair_clients:
            self.sharing = FairSharing(POLICIES[config.scheduling_policy])
            context.scheduler.share_by(self.sharing)
        self._accepted: set[Request] = set()
        self._max_of_client = config.max_requests_per_client
        self._outbox, self._clock = context.outbox, context.clock

    def refuse(self, submit: Submit) -> SubmitReply | None:
        live, new = self.live[submit.client], len(submit.requests)
        if self._max_of_client is None or not submit.client or live + new <= self._max_of_client:
            return None
        message = (
            f"this client has {live} requests in flight, and {new} more would exceed its share of "
            f"{self._max_of_client} (--max-requests-per-client)"
        )
        return SubmitReply(submit.call_id, "client_limit", message)

    def accept(self, request: Request) -> None:
        self._accepted.add(request)
        self.live[request.client] += 1
        self.deadlines.add(request)

    def on_end(self, request: Request) -> None:
        if request not in self._accepted:
            return
        self._accepted.remove(request)
        self.live[request.client] -= 1
        if not self.live[request.client]:
            del self.live[request.client]

    def poll(self) -> None:
        if not self.deadlines:
            return
        now = self._clock()
        for request, detail in self.deadlines.passed(now):
            request.end("deadline", detail, now)
            self._outbox.ended.append(request)
        self.deadlines.tidy(len(self._accepted))

    def seconds_left(self) -> float | None:
        return self.deadlines.seconds_to_next(self._clock())

    def stats(self) -> dict[str, Any]:
        return {"clients": len(self.live)}
