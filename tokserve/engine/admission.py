"""Whether a submission is accepted: all of its requests or none, with a `SubmitReply` either way.

What is accepted is registered and queued; if grammars must be compiled first, the reply waits for them
(`pending_grammars`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokserve.config import Config
from tokserve.engine.adapters import MAX_NAME, Adapters
from tokserve.engine.deadlines import Deadlines
from tokserve.engine.drafter import prediction_index
from tokserve.engine.front_ends import Emit
from tokserve.engine.grammars import Grammars
from tokserve.engine.output_buffer import Limits
from tokserve.engine.pending_grammars import PendingGrammars
from tokserve.engine.registry import Registry
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.engine.token_index import TokenIndex
from tokserve.errors import RequestError
from tokserve.messages import Status, Submit, SubmitReply
from tokserve.params import SamplingParams

logger = logging.getLogger(__name__)

DRAINING_RETRY = 5  # seconds


class Admission:
    """`submit` replies by `emit`.  `fail` ends a request that was accepted before its grammar failed; `wake` is called,
    from any thread, when a grammar is compiled."""

    def __init__(
        self,
        config: Config,
        *,
        limits: Limits,
        registry: Registry,
        scheduler: Scheduler,
        adapters: Adapters,
        grammars: Grammars,
        deadlines: Deadlines,
        emit: Emit,
        fail: Callable[[Request, str], None],
        wake: Callable[[], None],
    ) -> None:
        self.num_received = 0  # requests that were accepted, and the number of the next
        self.closed = False  # for good: the engine is about to end
        self.pending = PendingGrammars(emit, self._drop_refused, fail)
        self._fair = config.scheduler.fair_clients
        self._max_of_client = config.scheduler.max_requests_per_client
        self._reject_while_paused = config.server.reject_while_paused
        self._limits = limits
        self._registry = registry
        self._scheduler = scheduler
        self._adapters = adapters
        self._grammars = grammars
        self._deadlines = deadlines
        self._emit = emit
        self._wake = wake

    def submit(self, identity: bytes, submit: Submit, received: float, status: Status, now: float) -> None:
        """`received`: when it came in, by the clock of `now`."""
        reply = self._refusal(submit, status, now)
        if reply is None:
            try:
                requests = self._requests(identity, submit, received)
            except RequestError as error:
                reply = SubmitReply(submit.call_id, "invalid", error.message)
            except Exception:  # an unforeseen error of one submission must not end the others
                logger.exception("a request could not be admitted", extra={"request_id": submit.request_id})
                reply = SubmitReply(submit.call_id, "internal", "internal error at admission")
            else:
                self._accept(submit, requests)
                if any(request.pending_grammar is not None for request in requests):
                    return self.pending.add(identity, submit.call_id, requests)
                reply = SubmitReply(submit.call_id)
        self._emit(identity, reply)

    def _refusal(self, submit: Submit, status: Status, now: float) -> SubmitReply | None:
        """Why these requests are not accepted, if so; nothing of them is kept then."""
        if self.closed:
            return SubmitReply(submit.call_id, "draining", "the server is shutting down", DRAINING_RETRY)
        if status.quarantine is not None:
            return SubmitReply(submit.call_id, "quarantined", status.quarantine)
        if self._reject_while_paused and (status.paused or status.sleeping or status.state == "pausing"):
            return SubmitReply(submit.call_id, "paused", f"the engine is {status.state} (--reject-while-paused)")
        names = [spec.options.adapter for spec in submit.requests if spec.options.adapter]
        unknown = next((name for name in names if not self._adapters.get(name)), "")
        if unknown:
            return SubmitReply(submit.call_id, "model_not_found", f"no adapter {unknown[:MAX_NAME]!r} is loaded")
        if self._registry.in_use(submit.request_id, (spec.request_id for spec in submit.requests)):
            message = f"request_id {submit.request_id!r} is in use by a request in flight"
            return SubmitReply(submit.call_id, "duplicate_id", message)
        live, new = self._scheduler.num_live(submit.client), len(submit.requests)
        if self._max_of_client is not None and submit.client and live + new > self._max_of_client:
            message = (
                f"this client has {live} requests in flight, and {new} more would exceed its share of "
                f"{self._max_of_client} (--max-requests-per-client)"
            )
            return SubmitReply(submit.call_id, "client_limit", message)
        excess = self._scheduler.excess([len(spec.prompt.ids) // 4 for spec in submit.requests], now)
        return None if excess is None else SubmitReply(submit.call_id, "queue_full", *excess)

    def _requests(self, identity: bytes, submit: Submit, received: float) -> list[Request]:
        """One of each `EngineRequest`; compilation of its grammar has begun.  Raises RequestError."""
        requests = [
            Request(
                spec, owner=identity, number=number, received=received, limits=self._limits,
                adapter=self._adapters.get(spec.options.adapter), client=submit.client,
                share=None if self._fair else "",
            )
            for number, spec in enumerate(submit.requests, self.num_received)
        ]  # fmt: skip
        predictions: dict[bytes, TokenIndex] = {}  # choices share them
        for spec, request in zip(submit.requests, requests, strict=True):
            if spec.drafts:
                if spec.drafts not in predictions:
                    predictions[spec.drafts] = prediction_index(spec.drafts)
                request.expect(predictions[spec.drafts])
            if isinstance(request.task, SamplingParams) and request.task.structured_outputs is not None:
                request.pending_grammar = self._grammars.compile(request.task.structured_outputs, submit.client)
                request.pending_grammar.add_done_callback(lambda _: self._wake())
        return requests

    def _accept(self, submit: Submit, requests: list[Request]) -> None:
        self.num_received += len(requests)
        self._registry.add(submit.request_id, requests)
        for request in requests:
            self._deadlines.add(request)
            self._scheduler.add(request)

    def _drop_refused(self, request: Request) -> None:
        """Take out a request that is refused after all; no output tells its end."""
        request.end("error", "error", request.received)
        self._scheduler.drop(request)
        self._registry.remove(request)
