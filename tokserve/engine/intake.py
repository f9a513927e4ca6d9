"""Every request of an engine by its ids, from its announcement to its end, and the one place that ends requests.

A submission is announced (a front end prepares it), being admitted (its requests are made, a part in each turn),
accepted (registered and queued), or leaving (its client has gone, and it is aborted, a part in each turn).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import msgspec

from tokserve.engine.hooks import Hooks
from tokserve.engine.output.front_ends import Emit, FrontEnds
from tokserve.engine.pending import PendingReplies
from tokserve.engine.registry import Registry
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.protocol.messages import Abort, Announce, EngineRequest, Stall, Submit, SubmitReply
from tokserve.protocol.prompt import Feature, TokenPrompt

SLICE = 512  # requests of a submission that are made, or aborted, between two steps: some milliseconds


@dataclass(slots=True)
class AnnouncedRequest:
    """What is to come.  `ended`: why it was aborted."""

    request_id: str
    group_id: str | None
    ended: str | None = None


class Announcements:
    """The requests that front ends prepare.  An id may be there twice: who gets it is decided when one comes."""

    def __init__(self) -> None:
        self._announced: dict[tuple[bytes, int], AnnouncedRequest] = {}  # by front end and number

    def add(self, identity: bytes, announce: Announce) -> None:
        """A front end prepares a request."""
        self._announced[identity, announce.number] = AnnouncedRequest(announce.request_id, announce.group_id)

    def remove(self, identity: bytes, number: int) -> None:
        """No more will come of this number."""
        self._announced.pop((identity, number), None)

    def leave(self, identity: bytes) -> None:
        """A front end has gone."""
        self._announced = {key: request for key, request in self._announced.items() if key[0] != identity}

    def request_ids(self, group_id: str | None = None) -> list[str]:
        """The client's ids of a group, or all, that were not aborted."""
        return [
            request.request_id
            for request in self._announced.values()
            if request.ended is None and group_id in (None, request.group_id)
        ]

    def abort(self, request_ids: Container[str], reason: str) -> set[str]:
        """End what comes of these ids; returns those that were there and not aborted yet."""
        aborted = [
            request
            for request in self._announced.values()
            if request.ended is None and request.request_id in request_ids
        ]
        for request in aborted:
            request.ended = reason
        return {request.request_id for request in aborted}

    def aborted_ids(self) -> set[str]:
        return {request.request_id for request in self._announced.values() if request.ended is not None}

    def ended(self, identity: bytes, number: int) -> str | None:
        """Why the request of this number was aborted, if it was."""
        request = self._announced.get((identity, number))
        return None if request is None else request.ended


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


class Intake:
    """`announced`, `admitting` by the client's id in the order of their turns, and `accepted`.  `pending`: those of the
    accepted whose reply is still due.  `num_received`: requests that were numbered, and the number of the next."""

    def __init__(
        self,
        scheduler: Scheduler,
        front_ends: FrontEnds,
        hooks: Hooks,
        emit: Emit,
        clock: Callable[[], float],
    ) -> None:
        self.announced = Announcements()
        self.admitting: dict[str, PendingSubmission] = {}
        self.accepted = Registry()
        self.pending = PendingReplies(emit)
        self.num_received = 0
        self._leaving: deque[tuple[list[Request], str]] = deque()  # and why
        self._held: list[tuple[bytes, Abort | Stall]] = []  # until no submission is being admitted
        self._scheduler, self._front_ends, self._hooks, self._clock = scheduler, front_ends, hooks, clock

    # --- ids ---

    def in_use(self, submit: Submit) -> bool:
        """Whether the client's id, or that of one of its choices, is taken."""
        choice_ids = (spec.request_id for spec in submit.requests)
        return submit.request_id in self.admitting or self.accepted.in_use(submit.request_id, choice_ids)

    def request_ids(self, group_id: str | None = None) -> list[str]:
        """The client's ids of a group, or all, that have not ended or been aborted."""
        admitting = [
            request_id
            for request_id, large in self.admitting.items()
            if large.ended is None and group_id in (None, large.submit.requests[0].options.group_id)
        ]
        return [*self.accepted.request_ids(group_id), *admitting, *self.announced.request_ids(group_id)]

    def abort_ids(self, request_ids: Sequence[str], reason: str) -> dict[str, str]:
        """End what has these ids of clients, and what comes of them: for each "aborted", "finished" or "not_found"."""
        result = dict.fromkeys(request_ids, "not_found")
        aborted_before = self.announced.aborted_ids()
        coming = self.announced.abort(result, reason) | self._abort_admitting(result, reason)
        aborted: list[Request] = []
        for request_id in result:
            requests = self.accepted.requests(request_id)
            aborted += requests
            if requests or request_id in coming:
                result[request_id] = "aborted"
            elif request_id in aborted_before or self._has_ended(request_id):
                result[request_id] = "finished"
        self.abort(aborted, reason)
        return result

    def _abort_admitting(self, request_ids: Container[str], reason: str) -> set[str]:
        """End large submissions with these ids as soon as they are accepted; returns the ids of those."""
        aborted = {key for key, large in self.admitting.items() if large.ended is None and key in request_ids}
        for request_id in aborted:
            self.admitting[request_id].ended = reason
        return aborted

    def _has_ended(self, request_id: str) -> bool:
        large = self.admitting.get(request_id)
        return self.accepted.has_ended(request_id) or (large is not None and large.ended is not None)

    # --- for commands ---

    @property
    def live(self) -> Iterable[Request]:
        """The requests that have not ended."""
        return chain(self.accepted, *(large.requests for large in self.admitting.values()))

    def end_all(self, reason: str) -> None:
        """End them now, with what they have."""
        self._abort_admitting(self.admitting, reason)
        self.abort(list(self.accepted), reason)

    # --- messages of front ends ---

    def take(self, identity: bytes, message: Abort | Stall) -> None:
        """A client has gone, does not read, or reads again; what is being admitted hears of it once it is accepted."""
        if any(key in large.request_ids for large in self.admitting.values() for key in message.request_ids):
            self._held.append((identity, message))
            return
        requests = [self.accepted.get(request_id, identity) for request_id in message.request_ids]
        known = [request for request in requests if request is not None]
        if isinstance(message, Stall):
            for request in known:
                self._scheduler.stall(request, message.stalled)
            return
        for start in range(0, len(known), SLICE):
            self._leaving.append((known[start : start + SLICE], message.reason))
        if known:
            self.abort_leaving()

    def release_held(self) -> None:
        """Take the messages that waited, if nothing is being admitted any more."""
        if self._held and not self.admitting:
            held, self._held = self._held, []
            for identity, message in held:
                self.take(identity, message)

    @property
    def is_leaving(self) -> bool:
        """Whether requests are to be aborted, as their client has gone."""
        return bool(self._leaving)

    def abort_leaving(self) -> None:
        """Abort the next requests whose client has gone: thousands at once would hold up others' steps."""
        requests, reason = self._leaving.popleft()
        self.abort([request for request in requests if request.finish is None], reason)

    def free_id(self, request_id: str) -> None:
        """Abort those that leave, until none has the client's id."""
        while self._leaving and self.accepted.in_use(request_id, ()):
            self.abort_leaving()

    def leave(self, identity: bytes) -> int:
        """A front end has ended, and so do its requests; returns how many those were."""
        requests = self.accepted.owned_by(identity)
        self.abort(requests, "abort_disconnect")
        for large in [large for large in self.admitting.values() if large.identity == identity]:
            del self.admitting[large.submit.request_id]
            self.forget(large.requests)
        self.announced.leave(identity)
        return len(requests)

    # --- ends ---

    def abort(self, requests: list[Request], reason: str) -> None:
        """End accepted requests, and tell their clients."""
        for request in requests:
            request.end("abort", reason, self._clock())
            self.end(request)
        self._front_ends.send(requests)

    def fail(self, request: Request, message: str) -> None:
        """End a request that cannot go on."""
        request.end("error", "error", self._clock(), message=message)
        self.end(request)
        self._front_ends.send([request])

    def end(self, request: Request) -> None:
        """Take out a request that got its `finish` between steps."""
        self.pending.on_abort(request)
        self._scheduler.drop(request)
        self.accepted.remove(request)

    def forget(self, requests: Iterable[Request]) -> None:
        """Requests were made, and are not accepted: features keep nothing of them."""
        for request in requests:
            for on_end in self._hooks.on_end:
                on_end(request)

    def poll(self) -> None:
        """Answer submissions whose prerequisites have ended."""
        refused, failed = self.pending.poll()
        for request in refused:  # no output tells their end
            request.end("error", "error", request.history.received)
            self._scheduler.drop(request)
            self.accepted.remove(request)
        for request, message in failed:
            self.fail(request, message)
