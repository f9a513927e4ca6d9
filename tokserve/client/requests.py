"""The requests in flight: which request an output of the engine belongs to, and which consumers to notify.

Sends nothing: what to abort in the engine is returned to the caller.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from tokserve.base.errors import Conflict, EngineDead, RequestError, refused
from tokserve.client.request_state import ChoiceState, RequestState
from tokserve.protocol.messages import StepOutput, SubmitReply

TURN = 0.005  # seconds of notifying consumers before the event loop's other work gets its turn


class Requests:
    """What was sent and has not ended; `len` is the number of requests.  `tokens`: how much work those are, about, in
    tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self._requests: set[RequestState] = set()
        self._choices: dict[str, ChoiceState] = {}  # by the engine's request id
        self._abandoned: Counter[str] = Counter()  # engine requests given up that have not ended, by id
        self._submissions: dict[int, Sequence[RequestState]] = {}  # waiting for their admission, by call
        self._ready: deque[RequestState] = deque()  # with something to take, the longest waiting first
        self._notifying_later = False

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, and no output of an abandoned request is still to come."""
        return not (self._requests or self._choices or self._abandoned or self._submissions)

    def ids(self) -> list[str]:
        """The ids of all requests in flight, without prefixes."""
        return sorted({request_id.rpartition("#")[0] for request_id in self._choices})

    def add(self, call_id: int, requests: Sequence[RequestState]) -> None:
        """Register requests that are about to be sent as one submission.  Raises Conflict for an id in use here."""
        self.check_unused(requests)
        choices = {choice.request_id: choice for request in requests for choice in request.choices}
        admission: asyncio.Future[RequestError | None] = asyncio.get_running_loop().create_future()
        for request in requests:
            request.admission = admission
        self._choices.update(choices)
        self._requests.update(requests)
        self.tokens += sum(request.work for request in requests)
        self._submissions[call_id] = requests

    def in_use(self, choice_ids: Iterable[str]) -> bool:
        """Whether one of these is an engine request in flight."""
        return any(choice_id in self._choices for choice_id in choice_ids)

    def check_unused(self, requests: Sequence[RequestState]) -> None:
        if self.in_use(choice.request_id for request in requests for choice in request.choices):
            message = f"request_id {requests[0].request_id!r} is in use by a request in flight"
            raise Conflict(message, field="request_id", code="duplicate_id")

    def waits(self, call_id: int) -> bool:
        """Whether the reply to a submission is awaited, and none of its requests was given up."""
        requests = self._submissions.get(call_id, ())
        return bool(requests) and all(request in self._requests for request in requests)

    def resolve(self, reply: SubmitReply) -> None:
        """Accept or refuse a submission, as the engine's reply says."""
        requests = self._submissions.pop(reply.call_id)
        error = None
        if reply.refusal:
            error = refused(reply.refusal, reply.message, reply.retry_after, reply.field)
            for request in requests:
                if request in self._requests:
                    self._remove(request)
                    request.fail(error)
                else:  # abandoned meanwhile
                    self._forget_abandoned(choice.request_id for choice in request.choices)
        _set_admission(requests, error)

    def receive(self, output: StepOutput) -> list[str]:
        """Receive a step's output; returns the engine requests ended by a stop string, for the engine to abort."""
        stopped = []
        for request_id, token_ids, columns, rare in output.rows():
            if self._abandoned and request_id in self._abandoned:
                # the id may be in use again: this row is not for the new request
                if rare is not None and rare.finish is not None:
                    self._forget_abandoned([request_id])
                continue
            choice = self._choices.get(request_id)
            if choice is None:
                continue
            if choice.accept(token_ids, columns, rare):
                stopped.append(request_id)
            request = choice.request
            if choice.finished:
                del self._choices[request_id]
                request.num_open -= 1
                if request.num_open == 0:
                    self._requests.remove(request)
                    self.tokens -= request.work
            if request.enqueue(choice):
                self._ready.append(request)
        return stopped

    def notify(self) -> None:
        """Notify the consumers, once for all the output received so far.  After `TURN` seconds of it the event loop's
        other work comes first."""
        end = time.monotonic() + TURN
        while self._ready and not self._notifying_later:
            self._ready.popleft().notify()
            if self._ready and time.monotonic() > end:
                self._notifying_later = True
                asyncio.get_running_loop().call_soon(self._notify_rest)

    def _notify_rest(self) -> None:
        self._notifying_later = False
        self.notify()

    def abandon(self, request: RequestState) -> list[str]:
        """Give a request up; returns its engine requests that have not ended, for the engine to abort."""
        if request not in self._requests:
            return []
        request_ids = self._remove(request)
        request.abandon()
        self._abandoned.update(request_ids)
        return request_ids

    def fail(self, error: EngineDead) -> None:
        """The engine is gone: all requests end with the error."""
        requests, submissions = list(self._requests), list(self._submissions.values())
        self._requests.clear()
        self.tokens = 0
        self._choices.clear()
        self._abandoned.clear()
        self._submissions.clear()
        for request in requests:
            request.fail(error.again())
        for submission in submissions:
            _set_admission(submission, error.again())

    def _remove(self, request: RequestState) -> list[str]:
        """Remove it from the tables; returns its engine requests that have not ended."""
        self._requests.remove(request)
        self.tokens -= request.work
        request_ids = request.open_ids()
        for request_id in request_ids:
            del self._choices[request_id]
        return request_ids

    def _forget_abandoned(self, request_ids: Iterable[str]) -> None:
        """Abandoned requests have ended: no more output of them will come."""
        for request_id in request_ids:  # each by itself: a copy of the counter for every row would take seconds
            count = self._abandoned.pop(request_id, 0)
            if count > 1:
                self._abandoned[request_id] = count - 1


def _set_admission(requests: Sequence[RequestState], error: RequestError | None) -> None:
    if not requests[0].admission.done():
        requests[0].admission.set_result(error)
