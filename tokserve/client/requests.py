"""The requests in flight: which consumer waits for each, and which request an output of the engine belongs to.

Knows the engine's messages but sends none: what the engine must be told is returned to the caller.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from tokserve.client.inputs import Prepared
from tokserve.client.outputs import Choice, Delivery
from tokserve.client.stream import Submission
from tokserve.errors import Conflict, EngineDead, refused
from tokserve.messages import Step, Verdict

TURN = 0.02  # seconds of telling consumers before the loop's other work gets its turn


class Requests:
    """What was sent and has not ended; `len` is the number of requests."""

    def __init__(self) -> None:
        self._deliveries: dict[str, Delivery] = {}  # by the engine's id of their first choice
        self._owners: dict[str, Choice] = {}  # by engine request
        self._leaving: Counter[str] = Counter()  # engine requests given up that have not ended, by rid
        self._submissions: dict[int, Submission] = {}  # waiting for their verdict, by call
        self._news: deque[Delivery] = deque()  # with something to fetch, the longest waiting first

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def settled(self) -> bool:
        """Nothing is in flight, and no output of a request given up is still to come."""
        return not (self._deliveries or self._owners or self._leaving or self._submissions)

    def keys(self) -> list[str]:
        """The engine's keys of all requests in flight."""
        return sorted({rid.rpartition("#")[0] for rid in self._owners})

    def enter(self, call_id: int, prepared: Sequence[Prepared]) -> Submission:
        """Register prompts that are about to be sent as one request.  Raises Conflict for an id in use here."""
        choices = [choice for each in prepared for choice in each.choices]
        if any(choice.rid in self._owners for choice in choices):
            message = f"request_id {prepared[0].request_id!r} is in use by a request in flight"
            raise Conflict(message, field="request_id", code="duplicate_id")
        deliveries = [Delivery(each.choices[0].rid, each.choices) for each in prepared]
        self._deliveries.update((delivery.request_id, delivery) for delivery in deliveries)
        self._owners.update((choice.rid, choice) for choice in choices)
        self._submissions[call_id] = submission = Submission(deliveries)
        return submission

    def judge(self, verdict: Verdict) -> None:
        """Accept or refuse a submission, as the engine says."""
        submission = self._submissions.pop(verdict.call_id)
        if not verdict.refusal:
            return submission.settle(None)
        error = refused(verdict.refusal, verdict.message, verdict.retry_after, verdict.field)
        for delivery in submission.deliveries:
            if self._deliveries.get(delivery.request_id) is delivery:
                self._discard(delivery)
                delivery.fail(error)
            else:  # given up meanwhile
                self._left(choice.rid for choice in delivery.choices)
        submission.settle(error)

    def take(self, step: Step) -> list[str]:
        """Take a step's outputs; returns the engine requests ended by a stop string, for the engine to abort."""
        stopped = []
        for rid, ids, logprobs, extra in step.rows():
            if self._leaving and rid in self._leaving:  # the id may be in use again: this is not for the new request
                if extra is not None and extra.finish is not None:
                    self._left([rid])
                continue
            choice = self._owners.get(rid)
            if choice is None:
                continue
            if choice.accept(ids, logprobs, extra):
                stopped.append(choice.rid)
            delivery = choice.delivery
            if delivery.offer(choice):
                self._news.append(delivery)
            if choice.finished:
                del self._owners[choice.rid]
                if delivery.num_open == 0:
                    del self._deliveries[delivery.request_id]
        return stopped

    def tell(self) -> bool:
        """Tell the consumers, once for all the steps that came together, for `TURN` seconds.  True: some are left."""
        end = time.monotonic() + TURN
        while self._news:
            self._news.popleft().tell()
            if time.monotonic() > end:
                break
        return bool(self._news)

    def give_up(self, delivery: Delivery) -> list[str]:
        """Forget a request; returns the engine requests that have not ended, for the engine to abort."""
        if self._deliveries.get(delivery.request_id) is not delivery:
            return []
        rids = self._discard(delivery)
        delivery.abandon()
        self._leaving.update(rids)
        return rids

    def fail(self, error: EngineDead) -> None:
        """The engine is gone: all requests end with the error."""
        for delivery in self._deliveries.values():
            delivery.fail(error.again())
        for submission in self._submissions.values():
            submission.settle(error.again())
        self._deliveries.clear()
        self._owners.clear()
        self._leaving.clear()
        self._submissions.clear()

    def _discard(self, delivery: Delivery) -> list[str]:
        """Remove it from the tables; returns the engine requests that have not ended."""
        del self._deliveries[delivery.request_id]
        rids = delivery.open_rids()
        for rid in rids:
            del self._owners[rid]
        return rids

    def _left(self, rids: Iterable[str]) -> None:
        """Requests given up have ended: nothing more will come of them."""
        self._leaving.subtract(rids)
        self._leaving = +self._leaving
