"""The engine's loop: take messages, plan, submit, collect, answer; and the table of admin verbs.

Depth 1 and depth 2 are the same turn: plan if fewer than `depth` steps are in flight, else collect the oldest.
Messages are taken between turns, so an abort takes effect at the next step boundary and is acknowledged when
the request's blocks are free.  Knows no sockets, no threads and no device: `emit` carries answers away, the
clock is given.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from tokserve.config import Config
from tokserve.engine import listing
from tokserve.engine.adapters import Adapters
from tokserve.engine.admission import Admission
from tokserve.engine.cache import Cache
from tokserve.engine.control import Control
from tokserve.engine.deadlines import Deadlines
from tokserve.engine.following import Following
from tokserve.engine.front_ends import Emit, FrontEnds
from tokserve.engine.grammars import Grammars
from tokserve.engine.registry import Registry
from tokserve.engine.request import Limits, Request
from tokserve.engine.scheduler import Scheduler
from tokserve.engine.verb import STEP_BOUNDARY, Verb, Wait
from tokserve.errors import RequestError, StartError, Unavailable
from tokserve.executor.base import Executor
from tokserve.messages import Abort, Call, Ready, Reply, Stall, Status, StepStats, Submit, ToEngine
from tokserve.plan import DeviceFacts, StepPlan, StepResult

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.5  # seconds


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
        self._deadlines = Deadlines()
        self._following = Following(wake)
        self._front_ends = FrontEnds(emit, clock, self._gauges)
        self._admission = Admission(
            config, self.limits, self._registry, self.scheduler, self.adapters, self.grammars, self._deadlines,
            emit, self._fail, wake,
        )  # fmt: skip
        self._tasks: list[_Task] = []
        self._status = self._state_now()
        self._acknowledgements: deque[_Acknowledgement] = deque()
        self._begins = self.control.verbs | self.adapters.verbs | {"take_over": self._take_over}
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
        self._advance_grammars()
        while any([self._go_on(task) for task in list(self._tasks)]):
            pass  # a verb may have waited for what another has just done
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
        if self.scheduler.num_waiting and not self._may_wait:
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

    @property
    def _may_wait(self) -> bool:
        """Requests may wait although nothing runs: for a verb, a grammar, a mask that is late, or their client."""
        if self.control.idle_is_fine or self._admission.undecided or self._following:
            return True
        return self.scheduler.num_stalled > 0

    def _advance_grammars(self) -> None:
        """Take the grammars and the masks that have come since the last turn."""
        begun = self._admission.undecided.decide()
        if begun:
            self._following.advance(begun)
        if self._following:
            self._front_ends.send(self._end_followed())

    def _end_followed(self) -> list[Request]:
        """Of the requests whose masks have come, those whose grammar ends them."""
        now = self._clock()
        ended: list[Request] = []
        for request in self._following.done():
            if request.follower is not None and request.follower.error is not None:
                self.grammars.forget(request.follower.grammar)
            if request.finish is None:
                request.followed(now)
                if request.finish is not None:
                    self._end(request)
                    ended.append(request)
        return ended

    def _collect(self) -> None:
        plan, future = self._flights[0]
        result = future.result()
        self._flights.popleft()
        now = self._clock()
        told = self.scheduler.update(result, now)
        for request in told:
            if request.finish is not None:
                self._forget(request)
        if plan.masks is not None:
            self._following.advance(self.scheduler.running)
            told += [request for request in self._end_followed() if request not in told]
        self._front_ends.send(told)
        self._front_ends.refresh_stats(now - STATS_INTERVAL)
        self._acknowledge()

    def _rest(self) -> None:
        """Nothing to do: look for lost blocks, and send the last gauges to front ends that have seen others."""
        if len(self._registry):  # frozen, and more may come in
            self._front_ends.refresh_stats(self._clock())
        elif self._last_plan is not None:
            self._last_plan = None
            self.cache.check_idle()
            self._front_ends.refresh_stats(self._clock())

    def close(self) -> None:
        """End the threads and the process of grammars."""
        self.grammars.close()
        self._following.close()

    def summary(self) -> str:
        """What was being computed, for the log of a crash."""
        plans = [plan for plan, _ in self._flights]
        if self._last_plan is not None and all(plan is not self._last_plan for plan in plans):
            plans.append(self._last_plan)
        return "; ".join(plan.summary() for plan in plans) or "no step was in flight"

    def _acknowledge(self) -> None:
        """In order: a second abort of the same request must not be answered before its blocks are free either."""
        due = self._acknowledgements
        while due and all(request.released for request in due[0].requests):
            done = due.popleft()
            self._emit(done.identity, Reply(done.call_id, done.result))
        self.stopped = self._admission.closed and not due

    # --- messages ---

    def receive(self, identity: bytes, message: ToEngine, received: float | None = None) -> None:
        """Take a message of the front end `identity`; `received`: when it came in, by the same clock."""
        if self._front_ends.has_left(identity):
            return
        self._front_ends.enter(identity)
        if isinstance(message, Submit):
            now = self._clock()
            self._admission.submit(identity, message, now if received is None else received, self._status, now)
        elif isinstance(message, Stall):
            for rid in message.rids:
                stalled = self._registry.find(rid, identity)
                if stalled is not None:
                    self.scheduler.stall(stalled, message.stalled)
        elif isinstance(message, Abort):
            found = [self._registry.find(rid, identity) for rid in message.rids]
            self._abort([request for request in found if request is not None], message.reason)
        else:
            self._call(identity, message)

    def _fail(self, request: Request, message: str) -> None:
        """End a request that cannot go on."""
        request.end("error", "error", self._clock(), message=message)
        self._end(request)
        self._front_ends.send([request])

    def _abort(self, requests: list[Request], reason: str) -> None:
        """End these, and tell their owners."""
        for request in requests:
            request.end("abort", reason, self._clock())
            self._end(request)
        self._front_ends.send(requests)

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
            self._admission.undecided.ending(request)
        self.scheduler.drop(request)
        self._forget(request)

    @property
    def num_received(self) -> int:
        """The number that the next request will get."""
        return self._admission.num_received

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

    def _expire(self) -> None:
        """End what is past its deadline, with what it has."""
        if not self._deadlines:
            return
        now = self._clock()
        expired = []
        for request, detail in self._deadlines.passed(now):
            request.end("deadline", detail, now)
            self._end(request)
            expired.append(request)
        self._front_ends.send(expired)
        self._deadlines.tidy(len(self._registry))

    def seconds_to_deadline(self) -> float | None:
        """How long the loop may sleep when idle; None: until a message comes."""
        return self._deadlines.seconds_to_next(self._clock())

    # --- verbs: called with (identity, call id) and the caller's arguments, each answers by itself ---

    def _call(self, identity: bytes, call: Call) -> None:
        begin = self._begins.get(call.method)
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
            self._fail_call(identity, call.call_id, error)

    def _fail_call(self, identity: bytes, call_id: int, error: Exception) -> None:
        if isinstance(error, RequestError):
            reply = Reply(call_id, error=error.message, status=error.status, field=error.field)
        elif isinstance(error, StartError):  # what a sleep gave back cannot be had again
            reply = Reply(call_id, error=str(error), status=Unavailable.status)
        else:
            logger.error("a verb failed", exc_info=error)
            reply = Reply(call_id, error=f"{type(error).__name__} in the engine; its log says more")
        self._emit(identity, reply)

    def _go_on(self, task: _Task) -> bool:
        """Resume a verb for as long as what it waits for is there, and answer at its end; whether it was resumed."""
        resumed = False
        while self._is_due(task.wait):
            resumed = True
            try:
                task.wait = next(task.work)
                if isinstance(task.wait, Future):
                    task.wait.add_done_callback(lambda _: self._wake())
            except StopIteration as end:
                self._tasks.remove(task)
                self._tell_status()
                self._emit(task.identity, Reply(task.call_id, end.value))
                return True
            except Exception as error:  # as above
                self._tasks.remove(task)
                self._tell_status()
                self._fail_call(task.identity, task.call_id, error)
                return True
        self._tell_status()
        return resumed

    def _take_over(self, last: Any) -> Verb:
        """Be what an engine was that has ended, by the `Status` that it told last.  Nobody else may have called yet."""
        was = msgspec.convert(last, Status)
        self.adapters.take_over(was.adapters, was.num_loads)
        return (yield from self.control.take_over(was))

    def _is_due(self, wait: Wait) -> bool:
        if wait is STEP_BOUNDARY:
            return not self._flights
        return wait.done() if isinstance(wait, Future) else wait()

    def _state_now(self) -> Status:
        adapters = self.adapters
        return msgspec.structs.replace(self.control.status(), adapters=adapters.listed(), num_loads=adapters.num_loads)

    def _tell_status(self) -> None:
        status = self._state_now()
        if status != self._status:
            self._status = status
            self._front_ends.send_status(status)

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
        stats = self.scheduler.stats()
        status = self._status
        state = {
            "state": status.state, "weight_version": status.weight_version, "epoch": status.epoch,
            "running": stats.running, "waiting": stats.waiting, "since": self.control.since,
            "reason": status.quarantine or status.failure,
            "in_flight": len(self._flights), "steps": stats.steps,
        }  # fmt: skip
        self._emit(identity, Reply(call_id, state))

    def _gauges(self) -> StepStats:
        grammars = self.grammars
        return msgspec.structs.replace(
            self.scheduler.stats(), grammar_bytes=grammars.num_bytes, grammars_compiling=grammars.num_compiling,
            grammar_refusals=grammars.num_refused,
        )  # fmt: skip

    def _stats(self, identity: bytes, call_id: int) -> None:
        """Gauges and counters of this moment, ahead of the reply."""
        self._front_ends.send_stats(identity)
        self._emit(identity, Reply(call_id, {}))

    def _requests(self, identity: bytes, call_id: int, limit: int) -> None:
        """All submissions, oldest first, whichever front end sent them."""
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
        requests = self._registry.of(gone)
        self._abort(requests, "abort_disconnect")
        self._front_ends.leave(gone)
        self._emit(identity, Reply(call_id, len(requests)))

    def _shutdown(self, identity: bytes, call_id: int) -> None:
        self._admission.closed = True
        self._abort_acknowledged(identity, call_id, self._registry.keys(), "shutdown")

    def _reset_prefix_cache(self, identity: bytes, call_id: int) -> None:
        self.cache.reset()
        self._emit(identity, Reply(call_id, True))

    def _check(self, identity: bytes, call_id: int) -> None:
        self.cache.check()
        self._emit(identity, Reply(call_id, True))
