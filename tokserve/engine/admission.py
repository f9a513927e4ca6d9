"""Whether a submission is accepted: all of its requests or none, with a `SubmitReply` either way.

What is accepted is registered and queued; if features have something to prepare first, as a grammar to be compiled, the
reply waits for that (`pending`).  Thousands of requests in one submission are made in slices between steps, so that
others do not wait for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tokserve.base.errors import RequestError
from tokserve.config import Config
from tokserve.engine.hooks import Hooks, Prerequisite
from tokserve.engine.intake import SLICE, Intake, PendingSubmission
from tokserve.engine.output.front_ends import Emit
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.protocol.messages import Status, Submit, SubmitReply
from tokserve.protocol.params import SamplingParams

logger = logging.getLogger(__name__)

DRAINING_RETRY = 5  # seconds


class Admission:
    """`submit` replies by `emit`; `wake` is called, from any thread, when a prerequisite has ended."""

    def __init__(
        self,
        config: Config,
        *,
        limits: Limits,
        intake: Intake,
        scheduler: Scheduler,
        hooks: Hooks,
        emit: Emit,
        wake: Callable[[], None],
    ) -> None:
        self.closed = False  # for good: the engine is about to end
        self._reject_while_paused = config.server.reject_while_paused
        self._limits = limits
        self._intake = intake
        self._scheduler = scheduler
        self._hooks = hooks
        self._emit = emit
        self._wake = wake

    def submit(
        self, identity: bytes, submit: Submit, received: float, status: Status, now: float, ended: str | None = None
    ) -> None:
        """`received`: when it came in, by the clock of `now`.  `ended`: why it was aborted while it was prepared, if it
        was.  More than `SLICE` requests are left to `proceed`."""
        reply = self._refusal(submit, status, now) if ended is None else self._duplicate(submit)
        if reply is not None:
            return self._emit(identity, reply)
        first = self._intake.num_received
        self._intake.num_received += len(submit.requests)
        large = PendingSubmission(identity, submit, received, first)
        large.ended = ended
        if len(submit.requests) > SLICE:
            self._intake.admitting[submit.request_id] = large
        else:
            self._make(large)
            self._finish(large)

    def proceed(self, status: Status, now: float) -> None:
        """Make more requests of one large submission, in turns; at its end, accept all of it or refuse it."""
        admitting = self._intake.admitting
        large = admitting.pop(next(iter(admitting)))
        if self._make(large):
            admitting[large.submit.request_id] = large
            return
        if large.refusal is None and large.ended is None:  # others were accepted meanwhile
            large.refusal = self._refusal(large.submit, status, now)
        self._finish(large)

    def _make(self, large: PendingSubmission) -> bool:
        """Make the requests of the next slice; whether there are more to make."""
        try:
            self._make_slice(large)
        except RequestError as error:
            large.refusal = SubmitReply(large.submit.call_id, "invalid", error.message, field=error.field or "")
        except Exception:  # an unforeseen error of one submission must not end the others
            large.refusal = self._internal_error(large.submit)
        return large.refusal is None and len(large.requests) < len(large.submit.requests)

    def _finish(self, large: PendingSubmission) -> None:
        """Accept all requests, or none."""
        submit, requests = large.submit, large.requests
        prerequisites: dict[Request, list[Prerequisite]] = {}
        if large.refusal is None and large.ended is None:
            try:
                prerequisites = self._prepare(requests)
            except RequestError as error:
                large.refusal = SubmitReply(submit.call_id, "invalid", error.message, field=error.field or "")
            except Exception:  # as above
                large.refusal = self._internal_error(submit)
        if large.refusal is None:
            self._accept(submit, requests)
            if prerequisites:
                return self._intake.pending.add(large.identity, submit.call_id, requests, prerequisites)
        else:
            self._intake.forget(requests)
        self._emit(large.identity, large.refusal or SubmitReply(submit.call_id))
        if large.refusal is None and large.ended is not None:
            self._intake.abort(requests, large.ended)

    def _internal_error(self, submit: Submit) -> SubmitReply:
        logger.exception("a request could not be admitted", extra={"request_id": submit.request_id})
        return SubmitReply(submit.call_id, "internal", "internal error at admission")

    def _refusal(self, submit: Submit, status: Status, now: float) -> SubmitReply | None:
        """Why these requests are not accepted, if so; nothing of them is kept then."""
        if self.closed:
            return SubmitReply(submit.call_id, "draining", "the server is shutting down", DRAINING_RETRY)
        if status.quarantine is not None:
            return SubmitReply(submit.call_id, "quarantined", status.quarantine)
        if self._reject_while_paused and (status.paused or status.sleeping or status.state == "pausing"):
            return SubmitReply(submit.call_id, "paused", f"the engine is {status.state} (--reject-while-paused)")
        duplicate = self._duplicate(submit)
        if duplicate is not None:
            return duplicate
        for refuse in self._hooks.refuse:
            refusal = refuse(submit)
            if refusal is not None:
                return refusal
        excess = self._scheduler.excess([len(spec.prompt.ids) // 4 for spec in submit.requests], now)
        return None if excess is None else SubmitReply(submit.call_id, "queue_full", *excess)

    def _duplicate(self, submit: Submit) -> SubmitReply | None:
        """The refusal of an id that is in use."""
        if not self._intake.in_use(submit):
            return None
        message = f"request_id {submit.request_id!r} is in use by a request in flight"
        return SubmitReply(submit.call_id, "duplicate_id", message)

    def _make_slice(self, large: PendingSubmission) -> None:
        """Make one of each `EngineRequest` of the next slice.  Raises RequestError."""
        start = len(large.requests)
        sent = large.submit.requests[start : start + SLICE]
        specs = [large.with_features(spec) for spec in sent]
        requests = [
            Request(
                spec,
                owner=large.identity,
                number=number,
                received=large.received,
                limits=self._limits,
                client=large.submit.client,
            )
            for number, spec in enumerate(specs, large.first + start)
        ]
        large.requests += requests  # features that are attached to some of them will hear of their end
        for spec, request in zip(specs, requests, strict=True):
            for attach in self._hooks.attach:
                attach(request, spec)
            self._check_served(request)

    def _check_served(self, request: Request) -> None:
        """Raise RequestError for what only a feature serves that this engine does not have."""
        if request.options.adapter and request.variant is None:
            raise RequestError("this server serves no adapters", field="model")
        if isinstance(request.task, SamplingParams) and request.task.structured_outputs and not self._hooks.bitmask:
            raise RequestError("this server has no grammars", field="structured_outputs")

    def _prepare(self, requests: Sequence[Request]) -> dict[Request, list[Prerequisite]]:
        """What the requests wait for, those that do.  Raises RequestError."""
        result: dict[Request, list[Prerequisite]] = {}
        for request in requests:
            for prepare in self._hooks.prepare:
                prerequisite = prepare(request)
                if prerequisite is not None:
                    result.setdefault(request, []).append(prerequisite)
                    prerequisite.future.add_done_callback(lambda _: self._wake())
        return result

    def _accept(self, submit: Submit, requests: list[Request]) -> None:
        self._intake.accepted.add(submit.request_id, requests)
        for request in requests:
            for accept in self._hooks.accept:
                accept(request)
            self._scheduler.add(request)
