"""The engine's loop: take messages, plan, submit, collect, answer; and the table of admin verbs.

Depth 1 and depth 2 are the same turn: plan if fewer than `depth` steps are in flight, else collect the oldest.
Messages are taken between turns, so an abort takes effect at the next step boundary and is acknowledged when
the request's blocks are free.  Knows no sockets, no threads and no device: `emit` carries answers away, the
clock is given.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from tokserve.config import Config
from tokserve.engine import listing
from tokserve.engine.adapters import MAX_NAME, Adapters
from tokserve.engine.cache import Cache
from tokserve.engine.columns import StepColumns
from tokserve.engine.control import STEP_BOUNDARY, Control, Verb, Wait
from tokserve.engine.grammar import Grammars
from tokserve.engine.registry import Registry
from tokserve.engine.request import Limits, Request
from tokserve.engine.scheduler import Scheduler
from tokserve.engine.undecided import Undecided
from tokserve.errors import RequestError
from tokserve.executor.base import Executor
from tokserve.messages import Abort, Call, FromEngine, Ready, Reply, Status, StepStats, Submit, ToEngine, Verdict
from tokserve.plan import DeviceFacts, StepPlan, StepResult

logger = logging.getLogger(__name__)

FRONT_ENDS_KEPT = 256
DRAINING_RETRY = 5  # seconds
STATS_INTERVAL = 0.5  # seconds

Emit = Callable[[bytes, FromEngine], None]


@dataclass(slots=True)
class _Acknowledgement:
    """A reply that is due when all these requests are released."""

    identity: bytes
    call_id: int
    result: dict[str, str]
    requests: list[Request]


@dataclass(slots=True, eq=False)
class _Task:
    """A verb on its way, and what it waits for before it goes on."""

    identity: bytes
    call_id: int
    work: Verb
    wait: Wait = STEP_BOUNDARY


def _at_once() -> bool:
    return True


def _sendable(message: str) -> str:
    """Without the lone surrogates that names of files may bring along: they are no UTF-8."""
    return message.encode(errors="replace").decode()


def _warn_of_little_room(context: int, config: Config) -> None:
    if context < (config.model.max_model_len or 0):
        logger.warning(
            "the KV cache holds %d tokens, less than max_model_len %d: prompt and output together are limited "
            "to that; raise kv_cache_memory_bytes or lower max_model_len",
            context, config.model.max_model_len,
        )  # fmt: skip


class EngineCore:
    """One model's requests.  `receive` and `step` are called from one thread; see the module.

    `wake` is called, from any thread, when there is something to do that no message announces.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        facts: DeviceFacts,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        layout = facts.layout
        capacity = layout.num_blocks * layout.block_size
        context = min(config.model.max_model_len or capacity, capacity)
        eos = tuple(config.model.eos_token_ids or ())
        self.limits = Limits(context, facts.vocab_size, eos, config.model.logprobs_mode)
        self.cache = Cache(
            layout.num_blocks, layout.block_size, enabled=config.cache.enable_prefix_caching,
            model=config.model.model,
        )  # fmt: skip
        self.scheduler = Scheduler(config.scheduler, self.cache, facts.weight_version)
        self.control = Control(self, self.scheduler, self.cache, executor, facts.weight_version)
        self.adapters = Adapters(config.lora, self, self.cache, executor, config.server.served_model_name or [])
        self.grammars = Grammars(config, facts.vocab_size, eos)
        self._undecided = Undecided(emit, self._withdraw, self._fail_waiting)
        self.stopped = False
        self._facts = facts
        self._executor = executor
        self._emit = emit
        self._clock = clock
        self._wake = wake
        self._depth = config.scheduler.depth
        self._flights: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._last_plan: StepPlan | None = None
        self._registry = Registry()
        self._reject_while_paused = config.server.reject_while_paused
        self.num_received = 0
        self._tasks: list[_Task] = []
        self._status = self._state_now()
        self._deadlines: list[tuple[float, int, str, Request]] = []  # a heap
        self._acknowledgements: deque[_Acknowledgement] = deque()
        self._front_ends: OrderedDict[bytes, tuple[float, StepStats | None]] = OrderedDict()  # last stats: when, what
        self._left: set[bytes] = set()  # front ends whose process has ended
        self._stopping = False
        self._verbs: dict[str, Callable[..., Any]] = {
            "hello": self._hello,
            "ping": self._ping,
            "state": self._state,
            "stats": self._stats,
            "requests": self._requests,
            "abort": self._abort_keys,
            "abort_group": self._abort_group,
            "abort_all": self._abort_all,
            "leave": self._leave,
            "shutdown": self._shutdown,
            "reset_prefix_cache": self._reset_prefix_cache,
            "check": self._check,
        }
        _warn_of_little_room(context, config)

    # --- the loop ---

    def step(self) -> bool:
        """One turn; False when there is nothing to do until the next message or deadline."""
        self._expire()
        if self._undecided:
            self._undecided.decide()
        for task in list(self._tasks):
            self._go_on(task)
        if len(self._flights) < self._depth and not self._held_back:
            plan = self.scheduler.schedule(self._clock())
            if plan is not None:
                self._last_plan = plan
                self._flights.append((plan, self._executor.submit(plan)))
                if len(self._flights) < self._depth:
                    return True
        if self._flights:
            self._collect()
            return True
        if self.scheduler.num_waiting and not self.control.idle_is_fine and not self._undecided:
            raise RuntimeError(f"{self.scheduler.num_waiting} requests wait, but nothing runs: a bug of the scheduler")
        self._rest()
        return False

    @property
    def _held_back(self) -> bool:
        """Nothing may be planned: by the state, because a verb waits for the steps in flight to end, or because the
        tokens of the last step say what grammars allow in the next."""
        if self._flights and self._flights[-1][0].masks is not None:
            return True
        return self.control.frozen or any(task.wait is STEP_BOUNDARY for task in self._tasks)

    def _collect(self) -> None:
        result = self._flights[0][1].result()
        self._flights.popleft()
        now = self._clock()
        told = self.scheduler.update(result, now)
        for request in told:
            if request.finish is not None:
                self._forget(request)
        self._send(told)
        self._send_stats(now - STATS_INTERVAL)
        self._acknowledge()

    def _rest(self) -> None:
        """Nothing to do: look for lost blocks, and tell the last gauges to those who have seen others."""
        if len(self._registry):  # frozen, and more may come in
            self._send_stats(self._clock())
        elif self._last_plan is not None:
            self._last_plan = None
            self.cache.check_idle()
            self._send_stats(self._clock())

    def summary(self) -> str:
        """What was being computed, for the log of a crash."""
        plans = [plan for plan, _ in self._flights]
        if self._last_plan is not None and all(plan is not self._last_plan for plan in plans):
            plans.append(self._last_plan)
        return "; ".join(plan.summary() for plan in plans) or "no step was in flight"

    # --- answers ---

    def _send(self, requests: Iterable[Request]) -> None:
        """The new output of these requests, one message per front end."""
        steps: dict[bytes, StepColumns] = {}
        for request in requests:
            columns = steps.get(request.owner)
            if columns is None:
                columns = steps[request.owner] = StepColumns()
            request.tell(columns)
        for identity, columns in steps.items():
            self._send_step(identity, columns, self.scheduler.stats())

    def _send_step(self, identity: bytes, columns: StepColumns, stats: StepStats) -> None:
        self._remember(identity, stats)
        self._emit(identity, columns.step(stats))

    def _remember(self, identity: bytes, stats: StepStats | None) -> None:
        """Who is there, and what it was told last."""
        self._front_ends[identity] = (self._clock(), stats)
        if len(self._front_ends) > FRONT_ENDS_KEPT:
            self._front_ends.popitem(last=False)

    def _send_stats(self, before: float) -> None:
        """Gauges alone to the front ends that were told none since `before` and would see a difference."""
        stale = [identity for identity, (when, _) in self._front_ends.items() if when <= before]
        if stale:
            stats = self.scheduler.stats()
            for identity in stale:
                if self._front_ends[identity][1] != stats:
                    self._send_step(identity, StepColumns(), stats)

    def _acknowledge(self) -> None:
        """In order: a second abort of the same request must not be answered before its blocks are free either."""
        due = self._acknowledgements
        while due and all(request.released for request in due[0].requests):
            done = due.popleft()
            self._emit(done.identity, Reply(done.call_id, done.result))
        self.stopped = self._stopping and not due

    # --- messages ---

    def receive(self, identity: bytes, message: ToEngine, received: float | None = None) -> None:
        """Take a message of the front end `identity`; `received`: when it came in, by the same clock."""
        if identity in self._left:
            return  # its last words came after the news of its end
        if identity not in self._front_ends:
            self._remember(identity, None)
        if isinstance(message, Submit):
            self._submit(identity, message, self._clock() if received is None else received)
        elif isinstance(message, Abort):
            found = [self._registry.find(rid, identity) for rid in message.rids]
            self._abort([request for request in found if request is not None], message.reason)
        else:
            self._call(identity, message)

    def _submit(self, identity: bytes, submit: Submit, received: float) -> None:
        verdict = self._refusal(submit)
        if verdict is None:
            try:
                requests = [
                    Request(
                        add, identity, self.num_received + i, received, self.limits, self.adapters.find(add.adapter)
                    )
                    for i, add in enumerate(submit.adds)
                ]
            except RequestError as error:
                verdict = Verdict(submit.call_id, "invalid", error.message)
            except Exception:  # admission: whatever one request does to us, the others go on
                logger.exception("a request could not be admitted", extra={"request_id": submit.key})
                verdict = Verdict(submit.call_id, "internal", "internal error at admission")
            else:
                self._accept(submit, requests)
                if self._compile(requests):
                    return self._undecided.add(identity, submit.call_id, requests)
                verdict = Verdict(submit.call_id)
        self._emit(identity, verdict)

    def _compile(self, requests: list[Request]) -> bool:
        """Begin with the grammars that these ask for; whether there are any."""
        for request in requests:
            if request.params.structured_outputs is not None:
                request.grammar = self.grammars.compile(request.params.structured_outputs)
                request.grammar.add_done_callback(lambda _: self._wake())
        return any(request.grammar is not None for request in requests)

    def _withdraw(self, request: Request) -> None:
        """Take out a request that is refused after all; nobody is told of its end."""
        request.end("error", "error", self._clock())
        self.scheduler.drop(request)
        self._forget(request)

    def _fail_waiting(self, request: Request, message: str) -> None:
        request.end("error", "error", self._clock(), message=message)
        self._end(request)
        self._send([request])

    def _refusal(self, submit: Submit) -> Verdict | None:
        """Why these requests are not accepted, if so; nothing of them is kept then."""
        if self._stopping:
            return Verdict(submit.call_id, "draining", "the server is shutting down", DRAINING_RETRY)
        status = self._status
        if status.quarantine is not None:
            return Verdict(submit.call_id, "quarantined", status.quarantine)
        if self._reject_while_paused and (status.paused or status.sleeping or status.state == "pausing"):
            return Verdict(submit.call_id, "paused", f"the engine is {status.state} (--reject-while-paused)")
        unknown = next((add.adapter for add in submit.adds if add.adapter and not self.adapters.find(add.adapter)), "")
        if unknown:
            return Verdict(submit.call_id, "model_not_found", f"no adapter {unknown[:MAX_NAME]!r} is loaded")
        if self._registry.in_use(submit.key, (add.rid for add in submit.adds)):
            message = f"request_id {submit.key!r} is in use by a request in flight"
            return Verdict(submit.call_id, "duplicate_id", message)
        excess = self.scheduler.excess([len(add.prompt) // 4 for add in submit.adds], self._clock())
        return None if excess is None else Verdict(submit.call_id, "queue_full", *excess)

    def _accept(self, submit: Submit, requests: list[Request]) -> None:
        self.num_received += len(requests)
        self._registry.add(submit.key, submit.group, requests)
        for request, add in zip(requests, submit.adds, strict=True):
            for detail, limit in (("deadline", add.deadline_ms), ("queue_timeout", add.queue_timeout_ms)):
                if limit is not None:
                    due = request.received + limit / 1e3
                    heapq.heappush(self._deadlines, (due, request.number, detail, request))
            self.scheduler.add(request)

    def _abort(self, requests: list[Request], reason: str) -> None:
        """End these, and tell their owners."""
        for request in requests:
            request.end("abort", reason, self._clock())
            self._end(request)
        self._send(requests)

    def _abort_acknowledged(self, identity: bytes, call_id: int, keys: Iterable[str], reason: str) -> None:
        """The reply, {key: "aborted" | "finished" | "not_found"}, comes when all is free again."""
        result: dict[str, str] = {}
        aborted: list[Request] = []
        for key in dict.fromkeys(keys):
            found = self._registry.under(key)
            aborted += found
            ended = "finished" if self._registry.has_ended(key) else "not_found"
            result[key] = "aborted" if found else ended
        self._abort(aborted, reason)
        self._acknowledgements.append(_Acknowledgement(identity, call_id, result, aborted))
        self._acknowledge()

    def _end(self, request: Request) -> None:
        """A request that got its `finish` between steps."""
        if request.grammar is not None:
            self._undecided.ending(request)
        self.scheduler.drop(request)
        self._forget(request)

    @property
    def live(self) -> Iterable[Request]:
        """The requests that have not ended."""
        return self._registry

    def end_all(self, reason: str) -> None:
        """Abort all requests with what they have."""
        self._abort(list(self._registry), reason)

    def _forget(self, request: Request) -> None:
        self.scheduler.count_ages(request)
        self._registry.remove(request)

    # --- deadlines ---

    def _expire(self) -> None:
        """End what is past its deadline, with what it has."""
        if not self._deadlines:
            return
        now = self._clock()
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, detail, request = heapq.heappop(self._deadlines)
            if self._concerns(detail, request):
                request.end("deadline", detail, now)
                self._end(request)
                expired.append(request)
        self._send(expired)
        if len(self._deadlines) > 2 * len(self._registry) + 64:  # most are of requests that ended in time
            self._deadlines = [entry for entry in self._deadlines if self._concerns(entry[2], entry[3])]
            heapq.heapify(self._deadlines)

    def _concerns(self, detail: str, request: Request) -> bool:
        return request.finish is None and (detail == "deadline" or request.admitted is None)

    def seconds_to_deadline(self) -> float | None:
        """How long the loop may sleep when idle; None: until a message comes."""
        while self._deadlines and not self._concerns(self._deadlines[0][2], self._deadlines[0][3]):
            heapq.heappop(self._deadlines)
        return max(0.0, self._deadlines[0][0] - self._clock()) if self._deadlines else None

    # --- verbs: called with (identity, call id) and the caller's arguments, each answers by itself ---

    def _call(self, identity: bytes, call: Call) -> None:
        begin = self.control.verbs.get(call.method) or self.adapters.verbs.get(call.method)
        verb = self._verbs.get(call.method)
        if verb is None and begin is None:
            return self._emit(identity, Reply(call.call_id, error=f"the engine has no verb {call.method!r}"))
        try:
            if begin is not None:
                task = _Task(identity, call.call_id, begin(**call.args), wait=_at_once)
                self._tasks.append(task)
                self._go_on(task)
            elif verb is not None:
                verb(identity, call.call_id, **call.args)
        except Exception as error:  # a failed admin call is its caller's affair, the loop goes on
            self._fail(identity, call.call_id, error)

    def _fail(self, identity: bytes, call_id: int, error: Exception) -> None:
        if isinstance(error, RequestError):
            reply = Reply(call_id, error=_sendable(error.message), status=error.status, field=error.field)
        else:
            logger.error("a verb failed", exc_info=error)
            reply = Reply(call_id, error=f"{type(error).__name__} in the engine; its log says more")
        self._emit(identity, reply)

    def _go_on(self, task: _Task) -> None:
        """Resume a verb for as long as what it waits for is there; answer at its end."""
        while self._is_due(task.wait):
            try:
                task.wait = next(task.work)
                if isinstance(task.wait, Future):
                    task.wait.add_done_callback(lambda _: self._wake())
            except StopIteration as end:
                self._tasks.remove(task)
                self._tell_status()
                return self._emit(task.identity, Reply(task.call_id, end.value))
            except Exception as error:  # as above
                self._tasks.remove(task)
                self._tell_status()
                return self._fail(task.identity, task.call_id, error)
        self._tell_status()

    def _is_due(self, wait: Wait) -> bool:
        if wait is STEP_BOUNDARY:
            return not self._flights
        return wait.done() if isinstance(wait, Future) else wait()

    def _state_now(self) -> Status:
        return msgspec.structs.replace(self.control.status(), adapters=self.adapters.listed())

    def _tell_status(self) -> None:
        status = self._state_now()
        if status != self._status:
            self._status = status
            for identity in self._front_ends:
                self._emit(identity, status)

    def _hello(self, identity: bytes, call_id: int) -> None:
        layout = self._facts.layout
        ready = Ready(
            self.limits.context, self.limits.vocab_size, layout.num_blocks, layout.block_size,
            list(self.limits.eos), self._facts.weight_version, self._facts.facts, self._status,
        )  # fmt: skip
        self._emit(identity, ready)

    def _ping(self, identity: bytes, call_id: int) -> None:
        self._emit(identity, Reply(call_id, {}))

    def _state(self, identity: bytes, call_id: int) -> None:
        self.cache.check()
        stats = self.scheduler.stats()
        status = self._status
        state = {
            "state": status.state, "weight_version": status.weight_version, "epoch": status.epoch,
            "running": stats.running, "waiting": stats.waiting, "since": self.control.since,
            "reason": status.quarantine or status.failure,
            "in_flight": len(self._flights), "steps": stats.steps, "cache": "ok",
        }  # fmt: skip
        self._emit(identity, Reply(call_id, state))

    def _stats(self, identity: bytes, call_id: int) -> None:
        """Gauges and counters of this moment, ahead of the reply."""
        self._send_step(identity, StepColumns(), self.scheduler.stats())
        self._emit(identity, Reply(call_id, {}))

    def _requests(self, identity: bytes, call_id: int, limit: int) -> None:
        """What there is, oldest first, whichever front end sent it."""
        submissions = self._registry.submissions()
        result = {
            "weight_version": self.scheduler.weight_version, "total": len(submissions),
            "requests": listing.rows(submissions, limit, self._clock()),
        }  # fmt: skip
        self._emit(identity, Reply(call_id, result))

    def _abort_keys(self, identity: bytes, call_id: int, keys: list[str], reason: str = "abort_user") -> None:
        self._abort_acknowledged(identity, call_id, keys, reason)

    def _abort_group(self, identity: bytes, call_id: int, group: str, reason: str = "abort_user") -> None:
        self._abort_acknowledged(identity, call_id, self._registry.keys(group), reason)

    def _abort_all(self, identity: bytes, call_id: int, reason: str = "abort_user") -> None:
        self._abort_acknowledged(identity, call_id, self._registry.keys(), reason)

    def _leave(self, identity: bytes, call_id: int, front_end: str) -> None:
        """A front end's process has ended: so do its requests.  The reply is how many those were."""
        gone = front_end.encode()
        self._left.add(gone)
        requests = self._registry.of(gone)
        self._abort(requests, "abort_disconnect")
        self._front_ends.pop(gone, None)
        self._emit(identity, Reply(call_id, len(requests)))

    def _shutdown(self, identity: bytes, call_id: int) -> None:
        self._stopping = True
        self._abort_acknowledged(identity, call_id, self._registry.keys(), "shutdown")

    def _reset_prefix_cache(self, identity: bytes, call_id: int) -> None:
        self.cache.reset()
        self._emit(identity, Reply(call_id, True))

    def _check(self, identity: bytes, call_id: int) -> None:
        self.cache.check()
        self._emit(identity, Reply(call_id, True))
