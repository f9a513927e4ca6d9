"""Submissions whose verdict is still due: they are entered and queued, but a grammar of theirs is being compiled.

So a grammar that cannot be used refuses the request instead of failing it later, and whatever can happen to a waiting
request (abort, deadline, a full queue) can happen to these too; its grammar is then cancelled.  Knows nothing of
grammars beyond their futures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tokserve.engine.request import Request
from tokserve.errors import QueueFull, RequestError
from tokserve.messages import Verdict

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Submission:
    identity: bytes
    call_id: int
    requests: list[Request]
    told: bool = False  # a request of it has ended: the client was told that it was accepted


class Undecided:
    """`emit` carries verdicts away; `drop` takes a request out that is refused, `fail` ends one that was accepted."""

    def __init__(
        self,
        emit: Callable[[bytes, Verdict], None],
        drop: Callable[[Request], None],
        fail: Callable[[Request, str], None],
    ) -> None:
        self._emit, self._drop, self._fail = emit, drop, fail
        self._of: dict[Request, _Submission] = {}  # in order of receipt

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, identity: bytes, call_id: int, requests: list[Request]) -> None:
        """Some of these wait for their grammar."""
        self._of |= dict.fromkeys(requests, _Submission(identity, call_id, requests))

    def ending(self, request: Request) -> None:
        """A request ends before its output begins: the client hears first that it was accepted."""
        if request in self._of:
            self._accept(self._of[request])
            if request.grammar is not None:
                request.grammar.cancel()

    def decide(self) -> list[Request]:
        """Of those whose grammars are all there; returns the requests that begin to follow theirs."""
        begun = []
        for submission in dict.fromkeys(self._of.values()):
            grammars = [request.grammar for request in submission.requests if request.grammar is not None]
            if all(grammar.done() for grammar in grammars):
                for request in submission.requests:
                    del self._of[request]
                needed = (grammar.exception() for grammar in grammars if not grammar.cancelled())
                error = next((each for each in needed if each), None)
                if error is None:
                    begun += self._begin(submission)
                else:
                    self._refuse(submission, error)
        return begun

    def _begin(self, submission: _Submission) -> list[Request]:
        begun = [request for request in submission.requests if request.finish is None and request.grammar is not None]
        for request in begun:
            if request.grammar is not None:
                request.follow(request.grammar.result())
        self._accept(submission)
        return begun

    def _accept(self, submission: _Submission) -> None:
        if not submission.told:
            submission.told = True
            self._emit(submission.identity, Verdict(submission.call_id))

    def _refuse(self, submission: _Submission, error: BaseException) -> None:
        verdict = Verdict(submission.call_id, "internal", "the grammar could not be compiled")
        if isinstance(error, QueueFull):
            verdict = Verdict(submission.call_id, "queue_full", error.message, error.retry_after or 1)
        elif isinstance(error, RequestError):
            verdict = Verdict(submission.call_id, "invalid", error.message, field=error.field or "")
        else:
            logger.error("a grammar could not be compiled", exc_info=error)
        for request in submission.requests:
            if request.grammar is not None:
                request.grammar.cancel()
            if request.finish is None and submission.told:
                self._fail(request, verdict.message)
            elif request.finish is None:
                self._drop(request)
        if not submission.told:
            self._emit(submission.identity, verdict)
