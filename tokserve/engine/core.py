"""The engine's loop: take messages, plan, forward, sample, update, send.

    depth 1              plan 0 | forward 0 | sample 0 | update 0 | plan 1 | ...
    depth 2              ... | plan 1 | forward 1 | sample 1 | update 0 | plan 2 | ...
    depth 2, a grammar   ... | plan 1 | forward 1 | update 0 | masks | sample 1 | plan 2 | ...

All of these are the same turn: plan if fewer than `depth` steps are in flight, then collect the oldest once there are
that many.  A step is sampled from at once, unless a mask in it depends on a token of the step before: then that is
collected first, and masks are computed while the forward pass runs.  Messages are taken between turns, so an abort
takes effect at the next step boundary; it is acknowledged when the request's blocks are free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec

from tokserve.base.trace import LOOP, Spans
from tokserve.config import Config
from tokserve.engine.admin.aborts import Aborts
from tokserve.engine.admin.command import Command, Commands, command
from tokserve.engine.admin.control import Control
from tokserve.engine.admission import Admission
from tokserve.engine.features import EngineContext, Outbox, make_features
from tokserve.engine.hooks import Hooks
from tokserve.engine.intake import Intake
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.output.front_ends import Emit, FrontEnds
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.plan_builder import InFlightStep
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.executor.base import Executor
from tokserve.protocol.kv_spec import KVLayout
from tokserve.protocol.messages import (
    Announce,
    Call,
    EndAnnouncement,
    Ready,
    Status,
    Submit,
    ToEngine,
)
from tokserve.protocol.plan import DeviceFacts

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.5  # seconds


class EngineCore:
    """One model's requests.  `receive` and `step` are called from one thread.  `emit` sends messages; `wake` is called,
    from any thread, when there is something to do that no message announces."""

    def __init__(
        self,
        config: Config,
        executor: Executor,
        facts: DeviceFacts,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._facts, self._executor, self._clock = facts, executor, clock
        self._depth = config.scheduler.steps_in_flight
        self._last_step: InFlightStep | None = None  # since the engine was last idle
        self.stopped = False
        self.limits = limits = _limits(config, facts)
        self.cache = cache = _make_cache(config, facts.layout)
        self.scheduler = scheduler = Scheduler(
            config.scheduler, cache, facts.weight_version, joint_tokens=limits.joint_tokens
        )
        self._outbox, self._hooks, spans = Outbox(), Hooks(), Spans()
        self._span = spans.span
        self._front_ends = FrontEnds(emit, clock, scheduler.stats)
        self.intake = intake = Intake(scheduler, self._front_ends, self._hooks, emit, clock)
        self.control = Control(intake, scheduler, cache, executor, facts.weight_version, clock=clock)
        made_of = limits, cache, scheduler, self.control, executor, intake, self._outbox, self._hooks
        self.features = make_features(EngineContext(config, facts, *made_of, spans, clock, wake))
        self._hooks.collect(self.features)
        scheduler.use(self._hooks)
        self._admission = Admission(
            config, limits=limits, intake=intake, scheduler=scheduler, hooks=self._hooks, emit=emit, wake=wake
        )
        self._aborts = Aborts(intake, scheduler, self._hooks)
        self._status = self._state_now()
        owners = [self, self.control, self._aborts]
        self._commands = Commands(
            [*owners, *chain.from_iterable(feature.commands for feature in self.features)],
            emit=emit,
            at_boundary=lambda: not scheduler.in_flight,
            on_progress=self._send_status,
            wake=wake,
        )

    # --- the loop ---

    def step(self) -> bool:
        """One turn; False when there is nothing to do until the next message or deadline."""
        with self._span(LOOP):
            return self._turn()

    def _turn(self) -> bool:
        if self.control.expire():
            self._send_status()
        self.intake.poll()
        for poll in self._hooks.poll:
            poll()
        if self._outbox:
            self._empty_outbox()
        if self.intake.is_leaving:
            self.intake.abort_leaving()
        if self.intake.admitting:
            self._admission.proceed(self._status, self._clock())
            self.intake.release_held()
        self._commands.resume()
        in_flight = self.scheduler.in_flight
        if len(in_flight) < self._depth and self._may_plan and self._begin_step() and len(in_flight) < self._depth:
            return True
        if in_flight:
            self._collect()
            return True
        if self.intake.admitting or self.intake.is_leaving or self._outbox:
            return True
        if self.scheduler.num_waiting and not self._may_wait:
            raise RuntimeError(f"{self.scheduler.num_waiting} requests wait, but nothing runs: a bug of the scheduler")
        self._on_idle()
        return False

    @property
    def _may_plan(self) -> bool:
        """Whether neither the engine's state nor a command that waits for the steps in flight forbids another step."""
        return not self.control.frozen and not self._commands.wait_for_boundary

    @property
    def _may_wait(self) -> bool:
        """Whether requests may wait although nothing runs: for a command, a feature, or their client."""
        if self.control.may_be_idle or self.intake.pending:
            return True
        return self.scheduler.num_stalled > 0 or any(is_busy() for is_busy in self._hooks.is_busy)

    def _begin_step(self) -> bool:
        """Plan a step and begin its forward pass; whether there was anything to compute."""
        with self._span("schedule"):
            plan = self.scheduler.schedule(self._clock())
        if plan is None:
            return False
        self._last_step = self.scheduler.in_flight[-1]
        with self._span("forward"):
            self._executor.forward(plan)
        self._sample()
        return True

    def _sample(self) -> None:
        """Sample from the newest step, unless a mask still depends on a step before it."""
        step = self.scheduler.in_flight[-1]
        if step.future is None and all([can_sample(step) for can_sample in self._hooks.can_sample]):
            with self._span("sample"):
                masks = [bitmask(step) for bitmask in self._hooks.bitmask]
                step.future = self._executor.sample(next((mask for mask in masks if mask is not None), None))

    def _collect(self) -> None:
        """Take the result of the oldest step, and send what it brought."""
        step = self.scheduler.in_flight[0]
        assert step.future is not None
        with self._span("wait"):
            result = step.future.result()
        now = self._clock()
        with self._span("update"):
            requests = self.scheduler.update(result, now)
        for request in requests:
            if request.finish is not None:
                self.intake.accepted.remove(request)
        for on_result in self._hooks.on_result:
            on_result(step, result, now)
        if self._outbox.ended:
            requests += [request for request in self._take_ended() if request not in requests]
        for hold in self._hooks.hold:
            requests = hold(requests)
        if self.scheduler.in_flight:
            self._sample()
        with self._span("send"):
            self._front_ends.send(requests)
            self._front_ends.refresh_stats(now - STATS_INTERVAL)
        self._commands.resume()

    def _take_ended(self) -> list[Request]:
        """Take out the requests that features have ended."""
        ended, self._outbox.ended = self._outbox.ended, []
        for request in ended:
            self.intake.end(request)
        return ended

    def _empty_outbox(self) -> None:
        """Do what features have asked for."""
        outbox = self._outbox
        ready, outbox.ready = outbox.ready, []
        self._front_ends.send([*self._take_ended(), *ready])
        commands, outbox.commands = outbox.commands, []
        for begun in commands:
            self._commands.begin(begun)
        failed, outbox.failed = outbox.failed, []
        for request, reason in failed:
            if request.finish is None:
                self.intake.fail(request, reason)

    def _on_idle(self) -> None:
        """Check for lost blocks while there is nothing to do, and send the last gauges to front ends that
        were sent others."""
        if len(self.intake.accepted):  # frozen, and more may come in
            self._front_ends.refresh_stats(self._clock())
        elif self._last_step is not None and not any(holds() for holds in self._hooks.holds_blocks):
            self._last_step = None
            self.cache.check_idle()
            self._front_ends.refresh_stats(self._clock())

    def close(self) -> None:
        """End the threads and processes of features."""
        for close in self._hooks.close:
            close()

    def summary(self) -> str:
        """What was being computed, for the log of a crash."""
        steps = list(self.scheduler.in_flight)
        if self._last_step is not None and self._last_step not in steps:
            steps.append(self._last_step)
        return "; ".join(step.summary() for step in steps) or "no step was in flight"

    # --- messages ---

    def receive(self, identity: bytes, message: ToEngine, received: float | None = None) -> None:
        """Take a message of the front end `identity`; `received`: when it came in, by the same clock."""
        if self._front_ends.has_left(identity):
            return
        self._front_ends.enter(identity)
        with self._span("receive"):
            self._take(identity, message, received)

    def _take(self, identity: bytes, message: ToEngine, received: float | None) -> None:
        if isinstance(message, Submit):
            self.intake.free_id(message.request_id)
            now = self._clock()
            ended = self.intake.announced.ended(identity, message.announced)
            received = now if received is None else received
            self._admission.submit(identity, message, received, self._status, now, ended)
            self.control.note_request()
        elif isinstance(message, Call):
            self._commands.call(identity, message)
        elif isinstance(message, Announce):
            self.intake.announced.add(identity, message)
        elif isinstance(message, EndAnnouncement):
            self.intake.announced.remove(identity, message.number)
        else:
            self.intake.take(identity, message)

    def seconds_to_deadline(self) -> float | None:
        """How long the loop may sleep when idle; None: until a message comes."""
        ends = [self.control.seconds_to_expiry, *(left() for left in self._hooks.seconds_left)]
        return min((seconds for seconds in ends if seconds is not None), default=None)

    # --- status ---

    def _state_now(self) -> Status:
        status = self.control.status()
        for fields in self._hooks.status:
            status = msgspec.structs.replace(status, **fields())
        return status

    def _send_status(self) -> None:
        """Send a change of state to all front ends."""
        status = self._state_now()
        if status != self._status:
            self._status = status
            self._front_ends.send_status(status)

    # --- commands of its own; `engine/admin` and the drafter have the others ---

    @command("hello")
    def _hello(self) -> Ready:
        """Reply with what the engine serves."""
        layout = self._facts.layout
        return Ready(
            self.limits.context,
            self.limits.vocab_size,
            layout.num_blocks,
            layout.block_size,
            list(self.limits.eos),
            self._facts.weight_version,
            self._facts.facts,
            self._status,
        )

    @command("ping")
    def _ping(self) -> dict[str, Any]:
        return {}

    @command("state")
    def _state(self) -> dict[str, Any]:
        stats, status = self.scheduler.stats(), self._status
        return {
            "state": status.state,
            "weight_version": status.weight_version,
            "epoch": status.epoch,
            "running": stats.running,
            "waiting": stats.waiting,
            "since": self.control.since,
            "reason": self.control.why_frozen or status.failure,
            "paused_since": self.control.paused_since,
            "in_flight": len(self.scheduler.in_flight),
            "steps": stats.steps,
        }

    @command("stats")
    def _stats(self, caller: bytes) -> dict[str, Any]:
        """Send gauges and counters of this moment to the caller, ahead of the reply."""
        self._front_ends.send_stats(caller)
        return {}

    @command("requests")
    def _requests(self, limit: int) -> dict[str, Any]:
        """Submissions of all front ends, oldest first."""
        waits_for = (lambda request: "pause") if self.control.frozen else self.scheduler.waits_for
        listed = self.intake.accepted.summary(limit, self._clock(), waits_for)
        return {"weight_version": self.scheduler.weights.version, "epoch": self.scheduler.weights.epoch} | listed

    @command("check")
    def _check(self) -> bool:
        self.cache.check()
        return True

    @command("reset_prefix_cache")
    def _reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """`reset_external`: drop what features keep of earlier requests as well: outputs as drafts, the KV store."""
        self.cache.reset()
        if reset_external:
            for clear in self._hooks.clear:
                clear()
        return True

    @command("leave")
    def _leave(self, front_end: str) -> int:
        """A front end's process has ended: so do its requests.  The reply is how many those were."""
        identity = front_end.encode()
        count = self.intake.leave(identity)
        self._commands.leave(identity)
        self._front_ends.leave(identity)
        return count

    @command("shutdown")
    def _shutdown(self) -> Command:
        """Abort all requests and stop; no more are accepted."""
        self._admission.closed = True
        result = yield from self._aborts.all("shutdown")
        yield lambda: not self.intake.admitting  # those that were being admitted have been answered
        self.stopped = True
        return result

    @command("take_over")
    def _take_over(self, last: Any) -> Command:
        """Failover: be what the engine before was, by the `Status` that it sent last.  The first call of all."""
        was = msgspec.convert(last, Status)
        for take_over in self._hooks.take_over:
            take_over(was)
        return (yield from self.control.take_over(was))


def _make_cache(config: Config, layout: KVLayout) -> PrefixCache:
    """The prefix cache of a model with this layout."""
    return PrefixCache(
        layout.num_blocks,
        layout.block_size,
        enabled=config.cache.enable_prefix_caching,
        model=config.model.model,
    )


def _limits(config: Config, facts: DeviceFacts) -> Limits:
    """The limits of all requests; warns if the KV cache holds less than `max_model_len`."""
    model, capacity = config.model, facts.layout.num_blocks * facts.layout.block_size
    context = min(model.max_model_len or capacity, capacity)
    if context < (model.max_model_len or 0):
        logger.warning(
            "the KV cache holds %d tokens, less than max_model_len %d: prompt and output together are limited "
            "to that; raise kv_cache_memory_bytes, or lower max_model_len to be rid of this warning",
            context,
            model.max_model_len,
        )
    return Limits(
        context,
        facts.vocab_size,
        tuple(model.eos_token_ids or ()),
        model.logprobs_mode,
        facts.feature_bytes,
        facts.images,
        facts.whole_prompts,
    )
