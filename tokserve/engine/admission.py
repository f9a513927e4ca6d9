"""Whether what a front end submits is accepted: the whole of a `Submit` or nothing of it, with a verdict either way.

What is accepted is entered in the registry and queued; if grammars must be compiled first, the verdict waits for them
(`undecided`).  Knows neither steps nor outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokserve.config import Config
from tokserve.engine.adapters import MAX_NAME, Adapters
from tokserve.engine.deadlines import Deadlines
from tokserve.engine.front_ends import Emit
from tokserve.engine.grammars import Grammars
from tokserve.engine.registry import Registry
from tokserve.engine.request import Limits, Request
from tokserve.engine.scheduler import Scheduler
from tokserve.engine.undecided import Undecided
from tokserve.errors import RequestError
from tokserve.messages import Status, Submit, Verdict

logger = logging.getLogger(__name__)

DRAINING_RETRY = 5  # seconds


class Admission:
    """`submit` answers by `emit`.  `fail` ends a request that was accepted before its grammar failed; `wake` is called,
    from any thread, when a grammar is there."""

    def __init__(
        self,
        config: Config,
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
        self.undecided = Undecided(emit, self._withdraw, fail)
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
        verdict = self._refusal(submit, status, now)
        if verdict is None:
            try:
                requests = self._requests(identity, submit, received)
            except RequestError as error:
                verdict = Verdict(submit.call_id, "invalid", error.message)
            except Exception:  # admission: whatever one request does to us, the others go on
                logger.exception("a request could not be admitted", extra={"request_id": submit.key})
                verdict = Verdict(submit.call_id, "internal", "internal error at admission")
            else:
                self._accept(submit, requests)
                if any(request.grammar is not None for request in requests):
                    return self.undecided.add(identity, submit.call_id, requests)
                verdict = Verdict(submit.call_id)
        self._emit(identity, verdict)

    def _refusal(self, submit: Submit, status: Status, now: float) -> Verdict | None:
        """Why these requests are not accepted, if so; nothing of them is kept then."""
        if self.closed:
            return Verdict(submit.call_id, "draining", "the server is shutting down", DRAINING_RETRY)
        if status.quarantine is not None:
            return Verdict(submit.call_id, "quarantined", status.quarantine)
        if self._reject_while_paused and (status.paused or status.sleeping or status.state == "pausing"):
            return Verdict(submit.call_id, "paused", f"the engine is {status.state} (--reject-while-paused)")
        unknown = next((add.adapter for add in submit.adds if add.adapter and not self._adapters.find(add.adapter)), "")
        if unknown:
            return Verdict(submit.call_id, "model_not_found", f"no adapter {unknown[:MAX_NAME]!r} is loaded")
        if self._registry.in_use(submit.key, (add.rid for add in submit.adds)):
            message = f"request_id {submit.key!r} is in use by a request in flight"
            return Verdict(submit.call_id, "duplicate_id", message)
        live = self._scheduler.num_live(submit.client)
        if self._max_of_client is not None and submit.client and live + len(submit.adds) > self._max_of_client:
            message = (
                f"this client has {live} requests in flight, and {len(submit.adds)} more would exceed its share of "
                f"{self._max_of_client} (--max-requests-per-client)"
            )
            return Verdict(submit.call_id, "client_limit", message)
        excess = self._scheduler.excess([len(add.prompt) // 4 for add in submit.adds], now)
        return None if excess is None else Verdict(submit.call_id, "queue_full", *excess)

    def _requests(self, identity: bytes, submit: Submit, received: float) -> list[Request]:
        """One of each `Add`, with the grammar it waits for begun.  Raises RequestError."""
        client, share = submit.client, None if self._fair else ""
        requests = [
            Request(add, identity, number, received, self._limits, self._adapters.find(add.adapter), client, share)
            for number, add in enumerate(submit.adds, self.num_received)
        ]
        for request in requests:
            if request.params.structured_outputs is not None:
                request.grammar = self._grammars.compile(request.params.structured_outputs, submit.client)
                request.grammar.add_done_callback(lambda _: self._wake())
        return requests

    def _accept(self, submit: Submit, requests: list[Request]) -> None:
        self.num_received += len(requests)
        self._registry.add(submit.key, submit.group, requests)
        for request, add in zip(requests, submit.adds, strict=True):
            self._deadlines.add(request, add)
            self._scheduler.add(request)

    def _withdraw(self, request: Request) -> None:
        """Take out a request that is refused after all; no message tells its end."""
        request.end("error", "error", request.received)
        self._scheduler.drop(request)
        self._registry.remove(request)
