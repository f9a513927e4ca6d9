"""Whether a submission is accepted: all of its requests or none, with a `SubmitReply` either way.

What is accepted is registered and queued; if features have something to prepare first, as a grammar to be compiled, the
reply waits for that (`pending`).  Thousands of requests in one submission are made in slices between steps, so that
others do not wait for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property

import msgspec

from tokserve.base.errors import RequestError
from tokserve.config import Config
from tokserve.engine.hooks import Hooks, Prerequisite
from tokserve.engine.output.front_ends import Emit
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.pending import PendingReplies
from tokserve.engine.registry import Registry
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.protocol.messages import EngineRequest, Status, Submit, SubmitReply
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.prompt import Feature, TokenPrompt

logger = logging.getLogger(__name__)

DRAINING_RETRY = 5  # seconds
SLICE = 512  # requests of a submission that are made between two steps: some milliseconds


class PendingSubmission:
    """A submission on its way to being accepted or refused as a whole.  `first`: the number of its first request."""

    def __init__(self, identity: bytes, submit: Submit, received: float, first: int) -> None:
        self.identity, self.submit, self.received, self.first = identity, submit, received, first
        self.requests: list[Request] = []
        self.features: dict[tuple[bytes, int], Feature] = {}  # by hash and length: those with data
        self.refusal: SubmitReply | None = None
        self.ended: str | None = None  # why it was aborted before it was accepted

    def with_features(self, spec: EngineRequest) -> EngineRequest:
        """The request with the data of its features, which the first that has them brings."""
        features = spec.prompt.features
        if not features:
            return spec
        whole = []
        for feature in features:
            key = feature.hash, feature.length
            known = self.features.setdefault(key, feature)
            whole.append(msgspec.structs.replace(feature, data=known.data))
        return msgspec.structs.replace(spec, prompt=TokenPrompt(spec.prompt.ids, tuple(whole)))

    @cached_property
    def request_ids(self) -> frozenset[str]:
        return frozenset(spec.request_id for spec in self.submit.requests)


class Admission:
    """`submit` replies by `emit`.  `fail` ends a request that was accepted before its prerequisite failed, `abort`
    requests that were aborted before they were accepted; `wake` is called, from any thread, when a prerequisite has
    ended."""

    def __init__(
        self,
        config: Config,
        *,
        limits: Limits,
        registry: Registry,
        scheduler: Scheduler,
        hooks: Hooks,
        emit: Emit,
        fail: Callable[[Request, str], None],
        abort: Callable[[list[Request], str], None],
        wake: Callable[[], None],
    ) -> None:
        self.num_received = 0  # requests that were numbered, and the number of the next
        self.closed = False  # for good: the engine is about to end
        self.pending = PendingReplies(emit, self._drop_refused, fail)
        self._reject_while_paused = config.server.reject_while_paused
        self._limits = limits
        self._registry = registry
        self._scheduler = scheduler
        self._hooks = hooks
        self._emit = emit
        self._abort = abort
        self._wake = wake
        self._in_progress: dict[str, PendingSubmission] = {}  # by the client's id, in the order of their turns

    def submit(
        self, identity: bytes, submit: Submit, received: float, status: Status, now: float, ended: str | None = None
    ) -> None:
        """`received`: when it came in, by the clock of `now`.  `ended`: why it was aborted while it was prepared, if it
        was.  More than `SLICE` requests are left to `proceed`."""
        reply = self._refusal(submit, status, now) if ended is None else self._duplicate(submit)
        if reply is not None:
            return self._emit(identity, reply)
        first = self.num_received
        self.num_received += len(submit.requests)
        large = PendingSubmission(identity, submit, received, first)
        large.ended = ended
        if len(submit.requests) > SLICE:
            self._in_progress[submit.request_id] = large
        else:
            self._make(large)
            self._finish(large)

    @property
    def busy(self) -> bool:
        """Whether a large submission is neither accepted nor refused yet."""
        return bool(self._in_progress)

    def concerns(self, request_ids: Iterable[str]) -> bool:
        """Whether any of these requests belongs to a large submission that is neither accepted nor refused yet."""
        names = [large.request_ids for large in self._in_progress.values()]
        return any(request_id in ids for ids in names for request_id in request_ids)

    @property
    def requests(self) -> Iterable[Request]:
        """The requests of large submissions that are made, and neither accepted nor refused yet."""
        return (request for large in self._in_progress.values() for request in large.requests)

    def request_ids(self, group_id: str | None = None) -> list[str]:
        """The client's ids of large submissions, of a group or all, that are not accepted, refused or aborted."""
        return [
            request_id
            for request_id, large in self._in_progress.items()
            if large.ended is None and group_id in (None, large.submit.requests[0].options.group_id)
        ]

    def abort(self, request_ids: Container[str], reason: str) -> set[str]:
        """End large submissions with these ids of clients as soon as they are accepted; returns the ids of those."""
        aborted = {request_id for request_id in self.request_ids() if request_id in request_ids}
        for request_id in aborted:
            self._in_progress[request_id].ended = reason
        return aborted

    def has_ended(self, request_id: str) -> bool:
        """Whether a large submission that is not accepted yet was aborted."""
        return request_id in self._in_progress and self._in_progress[request_id].ended is not None

    def _forget(self, requests: Sequence[Request]) -> None:
        """Requests were made, and are not accepted: features keep nothing of them."""
        for request in requests:
            for on_end in self._hooks.on_end:
                on_end(request)

    def leave(self, identity: bytes) -> None:
        """A front end has gone: its large submissions are made no further."""
        for large in self._in_progress.values():
            if large.identity == identity:
                self._forget(large.requests)
        self._in_progress = {key: large for key, large in self._in_progress.items() if large.identity != identity}

    def proceed(self, status: Status, now: float) -> None:
        """Make more requests of one large submission, in turns; at its end, accept all of it or refuse it."""
        large = self._in_progress.pop(next(iter(self._in_progress)))
        if self._make(large):
            self._in_progress[large.submit.request_id] = large
            return
        if large.refusal is None and large.ended is None:  # others were accepted meanwhile
            large.refusal = self._refusal(large.submit, status, now)
        self._finish(large)

    def _make(self, large: PendingSubmission) -> bool:
        """Make the requests of the next slice; whether there are more to make."""
        try:
            self._make_slice(large)
        except RequestError as error:
            large.refusal = SubmitReply(large.submit.call_id, "invalid", error.message)
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
                large.refusal = SubmitReply(submit.call_id, "invalid", error.message)
            except Exception:  # as above
                large.refusal = self._internal_error(submit)
        if large.refusal is None:
            self._accept(submit, requests)
            if prerequisites:
                return self.pending.add(large.identity, submit.call_id, requests, prerequisites)
        else:
            self._forget(requests)
        self._emit(large.identity, large.refusal or SubmitReply(submit.call_id))
        if large.refusal is None and large.ended is not None:
            self._abort(requests, large.ended)

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
        in_use = self._registry.in_use(submit.request_id, (spec.request_id for spec in submit.requests))
        if not in_use and submit.request_id not in self._in_progress:
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
            raise RequestError("this server serves no adapters", field="adapter")
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
        self._registry.add(submit.request_id, requests)
        for request in requests:
            for accept in self._hooks.accept:
                accept(request)
            self._scheduler.add(request)

    def _drop_refused(self, request: Request) -> None:
        """Take out a request that is refused after all; no output tells its end."""
        request.end("error", "error", request.history.received)
        self._scheduler.drop(request)
        self._registry.remove(request)
