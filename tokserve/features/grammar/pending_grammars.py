"""Submissions whose reply is still due: they are registered and queued, but a grammar of theirs is being compiled.

So a grammar that cannot be used refuses the request instead of failing it later, and whatever can happen to a waiting
request (abort, deadline, a full queue) can happen to these too; its grammar is then cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tokserve.base.errors import QueueFull, RequestError
from tokserve.engine.request import Request
from tokserve.protocol.messages import SubmitReply

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Submission:
    identity: bytes
    call_id: int
    requests: list[Request]
    accept_sent: bool = False  # because a request of it has ended


class PendingGrammars:
    """`emit` sends replies; `drop` takes out a request that is refused, `fail` ends one that was accepted."""

    def __init__(
        self,
        emit: Callable[[bytes, SubmitReply], None],
        drop: Callable[[Request], None],
        fail: Callable[[Request, str], None],
    ) -> None:
        self._emit, self._drop, self._fail = emit, drop, fail
        self._submissions: dict[Request, _Submission] = {}  # in order of receipt

    def __bool__(self) -> bool:
        return bool(self._submissions)

    def add(self, identity: bytes, call_id: int, requests: list[Request]) -> None:
        """Some of these wait for their grammar."""
        self._submissions |= dict.fromkeys(requests, _Submission(identity, call_id, requests))

    def on_abort(self, request: Request) -> None:
        """A request ends before its output begins: the client is told first that it was accepted."""
        if request in self._submissions:
            self._accept(self._submissions[request])
            if request.pending_grammar is not None:
                request.pending_grammar.cancel()

    def poll(self) -> list[Request]:
        """Reply to the submissions whose grammars are all compiled; returns the requests that have theirs now."""
        ready = []
        for submission in dict.fromkeys(self._submissions.values()):
            grammars = [request.pending_grammar for request in submission.requests if request.pending_grammar]
            if all(grammar.done() for grammar in grammars):
                for request in submission.requests:
                    del self._submissions[request]
                outcomes = (grammar.exception() for grammar in grammars if not grammar.cancelled())
                error = next((outcome for outcome in outcomes if outcome), None)
                if error is None:
                    ready += self._attach(submission)
                else:
                    self._refuse(submission, error)
        return ready

    def _attach(self, submission: _Submission) -> list[Request]:
        ready = []
        for request in submission.requests:
            if request.finish is None and request.pending_grammar is not None:
                request.attach_grammar(request.pending_grammar.result())
                ready.append(request)
        self._accept(submission)
        return ready

    def _accept(self, submission: _Submission) -> None:
        if not submission.accept_sent:
            submission.accept_sent = True
            self._emit(submission.identity, SubmitReply(submission.call_id))

    def _refuse(self, submission: _Submission, error: BaseException) -> None:
        reply = SubmitReply(submission.call_id, "internal", "the grammar could not be compiled")
        if isinstance(error, QueueFull):
            reply = SubmitReply(submission.call_id, "queue_full", error.message, error.retry_after or 1)
        elif isinstance(error, RequestError):
            reply = SubmitReply(submission.call_id, "invalid", error.message, field=error.field or "")
        else:
            logger.error("a grammar could not be compiled", exc_info=error)
        for request in submission.requests:
            if request.finish is None and submission.accept_sent:
                self._fail(request, reply.message)
            elif request.finish is None:
                self._drop(request)
        if not submission.accept_sent:
            self._emit(submission.identity, reply)
