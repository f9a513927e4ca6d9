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
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tokserve.config import Config
from tokserve.engine.cache import Cache
from tokserve.engine.columns import StepColumns
from tokserve.engine.request import Limits, Request
from tokserve.engine.scheduler import Scheduler
from tokserve.errors import RequestError
from tokserve.executor.base import Executor
from tokserve.messages import Abort, Add, Call, Finish, FromEngine, Ready, Reply, StepStats, ToEngine
from tokserve.plan import DeviceFacts, StepPlan, StepResult

logger = logging.getLogger(__name__)

ENDED_KEPT = 10_000  # ended request ids that an abort still finds
FRONT_ENDS_KEPT = 256
STATS_INTERVAL = 0.5  # seconds

Emit = Callable[[bytes, FromEngine], None]


@dataclass(slots=True)
class _Acknowledgement:
    """A reply that is due when all these requests are released."""

    identity: bytes
    call_id: int
    result: dict[str, str]
    requests: list[Request]


class EngineCore:
    """One model's requests.  `receive` and `step` are called from one thread; see the module."""

    def __init__(
        self,
        config: Config,
        executor: Executor,
        facts: DeviceFacts,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = facts.layout
        capacity = layout.num_blocks * layout.block_size
        context = min(config.model.max_model_len or capacity, capacity)
        eos = tuple(config.model.eos_token_ids or ())
        self.limits = Limits(context, facts.vocab_size, eos, config.model.logprobs_mode)
        self.cache = Cache(
            layout.num_blocks, layout.block_size, enabled=config.cache.enable_prefix_caching,
            model=config.model.model, weight_version=facts.weight_version,
        )  # fmt: skip
        self.scheduler = Scheduler(config.scheduler, self.cache, facts.weight_version)
        self.stopped = False
        self._facts = facts
        self._executor = executor
        self._emit = emit
        self._clock = clock
        self._depth = config.scheduler.depth
        self._flights: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._last_plan: StepPlan | None = None
        self._live: dict[str, Request] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._num_received = 0
        self._deadlines: list[tuple[float, int, str, Request]] = []  # a heap
        self._acknowledgements: list[_Acknowledgement] = []
        self._front_ends: OrderedDict[bytes, tuple[float, StepStats | None]] = OrderedDict()  # last stats: when, what
        self._stopping = False
        self._verbs: dict[str, Callable[..., Any]] = {
            "hello": self._hello,
            "ping": self._ping,
            "state": self._state,
            "abort_all": self._abort_all,
            "shutdown": self._shutdown,
            "reset_prefix_cache": self._reset_prefix_cache,
            "check": self._check,
        }
        if context < (config.model.max_model_len or 0):
            logger.warning(
                "the KV cache holds %d tokens, less than max_model_len %d: prompt and output together are limited "
                "to that; raise kv_cache_memory_bytes or lower max_model_len",
                capacity, config.model.max_model_len,
            )  # fmt: skip

    # --- the loop ---

    def step(self) -> bool:
        """One turn; False when there is nothing to do until the next message or deadline."""
        self._expire()
        if len(self._flights) < self._depth:
            plan = self.scheduler.schedule(self._clock())
            if plan is not None:
                self._last_plan = plan
                self._flights.append((plan, self._executor.submit(plan)))
                if len(self._flights) < self._depth:
                    return True
        if self._flights:
            self._collect()
            return True
        if self.scheduler.num_waiting:
            raise RuntimeError(f"{self.scheduler.num_waiting} requests wait, but nothing runs: a bug of the scheduler")
        self._rest()
        return False

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
        if self._last_plan is not None:
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
        waiting = []
        for due in self._acknowledgements:
            if all(request.released for request in due.requests):
                self._emit(due.identity, Reply(due.call_id, due.result))
            else:
                waiting.append(due)
        self._acknowledgements = waiting
        self.stopped = self._stopping and not waiting

    # --- messages ---

    def receive(self, identity: bytes, message: ToEngine, received: float | None = None) -> None:
        """Take a message of the front end `identity`; `received`: when it came in, by the same clock."""
        if identity not in self._front_ends:
            self._remember(identity, None)
        if isinstance(message, Add):
            self._add(identity, message, self._clock() if received is None else received)
        elif isinstance(message, Abort):
            self._abort(identity, message.call_id, message.rids, message.reason)
        else:
            self._call(identity, message)

    def _add(self, identity: bytes, add: Add, received: float) -> None:
        if self._stopping:
            return self._refuse(identity, add.rid, Finish("abort", "shutdown", message="the engine is shutting down"))
        try:
            if add.rid in self._live:
                raise RequestError(f"request id {add.rid!r} is already in use")
            request = Request(add, identity, self._num_received, received, self.limits)
        except RequestError as error:
            return self._refuse(identity, add.rid, Finish("error", "error", message=error.message))
        except Exception:  # admission: whatever one request does to us, the others go on
            logger.exception("request %s could not be admitted", add.rid)
            return self._refuse(identity, add.rid, Finish("error", "error", message="internal error at admission"))
        self._num_received += 1
        self._live[request.rid] = request
        for detail, limit in (("deadline", add.deadline_ms), ("queue_timeout", add.queue_timeout_ms)):
            if limit is not None:
                heapq.heappush(self._deadlines, (received + limit / 1e3, request.number, detail, request))
        self.scheduler.add(request)

    def _refuse(self, identity: bytes, rid: str, finish: Finish) -> None:
        columns = StepColumns()
        columns.add(rid, array("i"))
        columns.describe(finish)
        self._send_step(identity, columns, self.scheduler.stats())

    def _abort(self, identity: bytes, call_id: int | None, rids: Iterable[str], reason: str) -> None:
        result: dict[str, str] = {}
        aborted = []
        for rid in rids:
            request = self._live.get(rid)
            if request is not None:
                request.end("abort", reason, self._clock())
                self._end(request)
                aborted.append(request)
                result[rid] = "aborted"
            else:
                result.setdefault(rid, "finished" if rid in self._ended else "not_found")
        self._send(aborted)
        if call_id is not None:
            self._acknowledgements.append(_Acknowledgement(identity, call_id, result, aborted))
            self._acknowledge()

    def _end(self, request: Request) -> None:
        """A request that got its `finish` between steps."""
        self.scheduler.drop(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._live[request.rid]
        self._ended[request.rid] = None
        self._ended.move_to_end(request.rid)
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

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
        if len(self._deadlines) > 2 * len(self._live) + 64:  # most are of requests that ended in time
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
        verb = self._verbs.get(call.method)
        if verb is None:
            return self._emit(identity, Reply(call.call_id, error=f"the engine has no verb {call.method!r}"))
        try:
            verb(identity, call.call_id, **call.args)
        except Exception as error:  # a failed admin call is its caller's affair, the loop goes on
            logger.exception("verb %s failed", call.method)
            self._emit(identity, Reply(call.call_id, error=f"{type(error).__name__}: {error}"))

    def _hello(self, identity: bytes, call_id: int) -> None:
        layout = self._facts.layout
        ready = Ready(
            self.limits.context, self.limits.vocab_size, layout.num_blocks, layout.block_size,
            list(self.limits.eos), self._facts.weight_version, self._facts.facts,
        )  # fmt: skip
        self._emit(identity, ready)

    def _ping(self, identity: bytes, call_id: int) -> None:
        self._emit(identity, Reply(call_id, {}))

    def _state(self, identity: bytes, call_id: int) -> None:
        self.cache.check()
        stats = self.scheduler.stats()
        state = {
            "running": stats.running, "waiting": stats.waiting, "in_flight": len(self._flights),
            "steps": stats.steps, "weight_version": self._facts.weight_version, "cache": "ok",
        }  # fmt: skip
        self._emit(identity, Reply(call_id, state))

    def _abort_all(self, identity: bytes, call_id: int, reason: str = "abort_user") -> None:
        self._abort(identity, call_id, list(self._live), reason)

    def _shutdown(self, identity: bytes, call_id: int) -> None:
        self._stopping = True
        self._abort(identity, call_id, list(self._live), "shutdown")

    def _reset_prefix_cache(self, identity: bytes, call_id: int) -> None:
        self.cache.reset()
        self._emit(identity, Reply(call_id, True))

    def _check(self, identity: bytes, call_id: int) -> None:
        self.cache.check()
        self._emit(identity, Reply(call_id, True))
