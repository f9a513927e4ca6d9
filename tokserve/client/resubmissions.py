"""Submissions that are sent again when their id is in use: by a request of another front end, whose client may have
left it, which is not known there yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tokserve.protocol.messages import Submit, SubmitReply

LEAVING_SECONDS = 0.25  # for which a request may seem to be in flight after its client has left
INTERVAL = LEAVING_SECONDS / 10  # seconds between two submissions


@dataclass(slots=True)
class SentSubmission:
    """A submission without an answer.  `refusal`: the last one, if it was refused; `end`: until when it is sent again;
    `announced`: the number by which aborts find it meanwhile."""

    submit: Submit
    refusal: SubmitReply | None = None
    end: float = 0.0
    announced: int = 0


class Resubmissions:
    """The submissions of one client.  `announce`: tell the engine of a request to come; returns its number, which
    `end_announcement` takes.  `waits`: whether the caller of a submission still waits for all its requests.  `resolve`
    gets the refusal of a submission that is not sent again."""

    def __init__(
        self,
        *,
        send: Callable[[Submit], None],
        announce: Callable[[str, str | None], int],
        end_announcement: Callable[[int], None],
        waits: Callable[[int], bool],
        resolve: Callable[[SubmitReply], None],
    ) -> None:
        self._send = send
        self._announce = announce
        self._end_announcement = end_announcement
        self._waits = waits
        self._resolve = resolve
        self._sent: dict[int, SentSubmission] = {}  # by call

    def sent(self, submit: Submit) -> None:
        """Keep a submission until it is answered."""
        self._sent[submit.call_id] = SentSubmission(submit)

    def repeats(self, reply: SubmitReply) -> bool:
        """Whether the submission is sent again, instead of ending with this reply."""
        sent = self._sent.get(reply.call_id)
        if sent is None:
            return False
        loop = asyncio.get_running_loop()
        if sent.refusal is None:
            sent.end = loop.time() + LEAVING_SECONDS
        if reply.refusal != "duplicate_id" or loop.time() >= sent.end or not self._waits(reply.call_id):
            self._forget(reply.call_id)
            return False
        if sent.refusal is None:
            sent.announced = self._announce(sent.submit.request_id, sent.submit.requests[0].options.group_id)
        sent.refusal = reply
        loop.call_later(INTERVAL, self._send_again, reply.call_id)
        return True

    def _send_again(self, call_id: int) -> None:
        sent = self._sent.get(call_id)
        if sent is None or sent.refusal is None:
            return
        if self._waits(call_id):
            self._send(msgspec.structs.replace(sent.submit, announced=sent.announced))
        else:
            self._forget(call_id)
            self._resolve(sent.refusal)

    def _forget(self, call_id: int) -> None:
        sent = self._sent.pop(call_id)
        if sent.announced:
            self._end_announcement(sent.announced)

    def clear(self) -> None:
        """Forget all: the engine is gone."""
        for call_id in list(self._sent):
            self._forget(call_id)
