"""Submissions whose reply is still due: they are registered and queued, but a feature prepares something for them.

So a prerequisite that fails (a grammar that cannot be used) refuses the request instead of failing it later, and
whatever can happen to a waiting request (abort, deadline, a full queue) can happen to these too; its prerequisites are
then cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from tokserve.base.errors import QueueFull, RequestError
from tokserve.engine.hooks import Prerequisite
from tokserve.engine.request import Request
from tokserve.protocol.messages import SubmitReply

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Submission:
    identity: bytes
    call_id: int
    requests: list[Request]
    prerequisites: dict[Request, list[Prerequisite]]
    accept_sent: bool = False  # because a request of it has ended


class PendingReplies:
    """`emit` sends replies."""

    def __init__(self, emit: Callable[[bytes, SubmitReply], None]) -> None:
        self._emit = emit
        self._refused: list[Request] = []
        self._failed: list[tuple[Request, str]] = []
        self._submissions: dict[Request, _Submission] = {}  # in order of receipt

    def __bool__(self) -> bool:
        return bool(self._submissions)

    def add(
        self, identity: bytes, call_id: int, requests: list[Request], prerequisites: dict[Request, list[Prerequisite]]
    ) -> None:
        """Some of these wait for their prerequisites."""
        self._submissions |= dict.fromkeys(requests, _Submission(identity, call_id, requests, prerequisites))

    def on_abort(self, request: Request) -> None:
        """A request ends before its output begins: the client is told first that it was accepted."""
        submission = self._submissions.get(request)
        if submission is not None and request in submission.prerequisites:
            self._accept(submission)
            for prerequisite in submission.prerequisites[request]:
                prerequisite.future.cancel()

    def poll(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Reply to submissions whose prerequisites have all ended; features hear of those that succeeded.  Returns
        requests that are refused, and requests that were accepted before and cannot go on, with the reason."""
        for submission in dict.fromkeys(self._submissions.values()):
            prerequisites = list(chain.from_iterable(submission.prerequisites.values()))
            if all(prerequisite.future.done() for prerequisite in prerequisites):
                for request in submission.requests:
                    del self._submissions[request]
                errors = (one for one in prerequisites if not one.future.cancelled() and one.future.exception())
                first = next(errors, None)
                if first is None:
                    self._begin(submission)
                else:
                    self._refuse(submission, first)
        refused, self._refused = self._refused, []
        failed, self._failed = self._failed, []
        return refused, failed

    def _begin(self, submission: _Submission) -> None:
        for request, prerequisites in submission.prerequisites.items():
            if request.finish is None:
                for prerequisite in prerequisites:
                    prerequisite.ready()
        self._accept(submission)

    def _accept(self, submission: _Submission) -> None:
        if not submission.accept_sent:
            submission.accept_sent = True
            self._emit(submission.identity, SubmitReply(submission.call_id))

    def _refuse(self, submission: _Submission, failed: Prerequisite) -> None:
        error = failed.future.exception()
        reply = SubmitReply(submission.call_id, "internal", failed.failure)
        if isinstance(error, QueueFull):
            reply = SubmitReply(submission.call_id, "queue_full", error.message, error.retry_after or 1)
        elif isinstance(error, RequestError):
            reply = SubmitReply(submission.call_id, "invalid", error.message, field=error.field or "")
        else:
            logger.error("%s", failed.failure, exc_info=error)
        for request in submission.requests:
            if request.finish is None and submission.accept_sent:
                self._failed.append((request, reply.message))
            elif request.finish is None:
                self._refused.append(request)
        if not submission.accept_sent:
            self._emit(submission.identity, reply)
