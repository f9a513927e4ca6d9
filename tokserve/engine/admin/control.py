"""Whether steps are planned: the commands pause, sleep and wake_up, and the engine's state as front ends see it.

Which weights serve is in `current_weights`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from tokserve.base.errors import Conflict, RequestError
from tokserve.engine.admin.command import PREPARED, STEP_BOUNDARY, Command, RunningRequests, command
from tokserve.engine.admin.current_weights import CurrentWeights
from tokserve.engine.admin.lease import Lease, check_lease
from tokserve.engine.admin.states import GENERATION, Region
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.scheduler import Scheduler
from tokserve.executor.base import Executor
from tokserve.protocol.commands import LEVELS, MEMORY, MODES, TAGS
from tokserve.protocol.messages import Status

logger = logging.getLogger(__name__)


class Control:
    """`frozen`, `may_be_idle` and `status` are for the core."""

    def __init__(
        self,
        requests: RunningRequests,
        scheduler: Scheduler,
        cache: PrefixCache,
        executor: Executor,
        weight_version: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self.weights = CurrentWeights(requests, scheduler, cache, executor, weight_version)
        self._generation = Region(GENERATION, "running")
        self._pause: Lease | None = None  # how long the pause lasts
        self.paused_since: float | None = None  # Unix time
        self._waiting_is_logged = False  # that requests wait, since no step can be planned
        self._resumes = 0  # how often `resume` was called
        self._barriers: list[int] = []  # of commands that wait for requests to end
        self._asleep: set[str] = set()
        self._releases = 0  # how often the KV cache's memory was given back
        self._dropping = 0  # sleeps that are about to drop the weights
        self.since = time.time()  # of the state
        self._last_state = "running"

    def use_weights(self, weights: CurrentWeights) -> None:
        """Ask these, which are those of the start as well, from here on."""
        self.weights = weights

    @property
    def is_settled(self) -> bool:
        """Whether no sleep is about to drop the weights."""
        return not self._dropping

    # --- for the core ---

    @property
    def _paused(self) -> bool:
        return self._generation.state == "paused"

    @property
    def seconds_to_expiry(self) -> float | None:
        """The seconds until a lease expires; None: none will."""
        pause = None if self._pause is None else self._pause.seconds_left
        ends = [seconds for seconds in (pause, self.weights.seconds_to_expiry) if seconds is not None]
        return min(ends, default=None)

    def expire(self) -> bool:
        """End what has a lease that has expired; whether anything had."""
        expired = self.weights.expire()
        if self._pause is not None and self._pause.seconds_left == 0.0:
            logger.warning(
                "resumed: the pause was not extended for %.0f s (its lease: %g s)",
                self._pause.silence,
                self._pause.seconds,
            )
            self._end_pause()
            return True
        return expired

    def note_request(self) -> None:
        """A request has come: log, once for each time that nothing runs, that it waits, and for what."""
        if self.frozen and not self._waiting_is_logged:
            self._waiting_is_logged = True
            logger.info("requests wait: %s", self.why_frozen)

    @property
    def why_frozen(self) -> str | None:
        """Why no step is planned, and what changes that; None: steps are planned."""
        if self.weights.quarantine is not None:
            return self.weights.quarantine
        causes = []
        if self._paused:
            left = None if self._pause is None else self._pause.seconds_left
            ends = "" if left is None else f", or after {left:.0f} s without an extension"
            causes.append(f"generation is paused until POST /resume{ends}")
        if self._asleep or self.weights.dropped:
            causes.append("the engine is asleep until POST /wake_up")
        if self.weights.dropped:
            causes.append("there are no weights until some are pushed")
        if not causes and self.frozen:
            causes.append("a weight update that replaces the weights in place is open")
        return "; ".join(causes) or None

    @property
    def frozen(self) -> bool:
        """Whether no step may be planned."""
        return self._paused or bool(self._asleep) or not self.weights.can_compute

    @property
    def may_be_idle(self) -> bool:
        """Whether requests may wait although nothing runs."""
        return self.frozen or bool(self._barriers)

    @property
    def state(self) -> str:
        """running, pausing, paused, updating, sleeping or quarantined: the first that holds, from the last one on."""
        weights = self.weights
        if weights.quarantine is not None and not weights.is_updating:
            return "quarantined"
        if self._asleep:
            return "sleeping"
        if weights.is_updating:
            return "updating"
        if not weights.loaded:
            return "sleeping"
        return self._generation.state

    def status(self) -> Status:
        """The state for front ends."""
        state = self.state
        if state != self._last_state:
            self._last_state, self.since = state, time.time()
        if not self.frozen:
            self._waiting_is_logged = False
        weights, origin = self.weights, self.weights.origin
        sleeping = bool(self._asleep) or (weights.dropped and weights.quarantine is None)
        return Status(
            state,
            weights.version,
            weights.epoch,
            self._paused,
            sleeping,
            weights.quarantine,
            weights.failure,
            source=origin.source,
            stamp=origin.stamp,
            pushed=origin.pushed,
            lost=weights.lost,
            asleep=sorted(self._asleep),
            dropped=weights.dropped,
            checksum=weights.checksum,
            pause_lease=0.0 if self._pause is None else self._pause.seconds,
        )

    # --- failover ---

    def take_over(self, was: Status) -> Command:
        """Failover: be paused and asleep as the engine before was, with its weights and its epoch."""
        yield STEP_BOUNDARY
        if was.paused:
            self._generation.fire("pause")
            self._begin_pause(was.pause_lease)
        self._asleep.update(was.asleep)
        memory = [*(tag for tag in was.asleep if tag == "kv_cache"), *(["weights"] if was.dropped else [])]
        if memory:
            self._release(memory)
        yield from self.weights.take_over(was)
        return {}

    # --- pause ---

    @command("pause")
    def pause(
        self, mode: str = "abort", clear_cache: bool = True, lease: float | None = None, take_over: bool = False
    ) -> Command:
        """Stop generating: `abort` ends what is in flight, `wait` lets it end, `keep` freezes it with its KV, `retract`
        takes the KV, which is computed again afterwards, with the weights that serve then.

        `lease`: resume after so many seconds without `extend_pause`; None or 0: never.  Of two pauses the longer lease
        holds, but with `take_over` this one.
        """
        if mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", field="mode")
        check_lease(lease)
        resumes = self._resumes
        self._generation.fire("pause")
        yield from self._quiesce(mode, "abort_pause", lambda: self._resumes > resumes)
        if self._resumes > resumes:
            raise Conflict("resume was called before the pause was reached")
        self._begin_pause(lease or 0.0, mode, take_over=take_over)
        if clear_cache:
            self._cache.reset()
        return {"status": "paused"}

    def _begin_pause(self, lease: float, mode: str = "keep", *, take_over: bool = False) -> None:
        if self._pause is None:
            self.paused_since = time.time()
            logger.info("paused (mode %s%s)", mode, f", lease {lease:g} s" if lease else "")
        elif not take_over:
            lease = max(lease, self._pause.seconds) if lease and self._pause.seconds else 0.0
        self._pause = Lease(lease, self._clock)
        self._generation.fire("reached")

    def _end_pause(self) -> None:
        self._generation.fire("resume")
        self._pause = self.paused_since = None

    @command("extend_pause")
    def extend_pause(self) -> Command:
        """The holder of the pause lives; Conflict if there is none any more."""
        yield from ()
        if self._pause is None:
            raise Conflict("generation is not paused any more")
        self._pause.extend()
        return {"status": "paused"}

    def _quiesce(self, mode: str, reason: str, off: Callable[[], bool] = lambda: False) -> Command:
        """Until requests are treated as `mode` says and no step is in flight; `off`: stop waiting."""
        if mode == "abort":
            self._requests.end_all(reason)
        elif mode == "wait":
            yield from self._drained(off)
        yield STEP_BOUNDARY
        if mode == "retract":
            self.weights.recompute_kv()

    def _drained(self, off: Callable[[], bool]) -> Command:
        """Until the requests received so far have ended, or nothing can run; later ones wait."""
        last = self._requests.num_received
        self._barriers.append(last)
        try:
            self._scheduler.barrier = min(self._barriers)
            yield lambda: self.frozen or off() or all(request.number >= last for request in self._requests.live)
        finally:
            self._barriers.remove(last)
            self._scheduler.barrier = min(self._barriers, default=None)

    @command("resume")
    def resume(self) -> Command:
        """Go on; also ends a sleep of level 0.  Always succeeds."""
        yield from ()
        self._resumes += 1
        if self._pause is not None:
            logger.info("resumed after %.1f s", self._pause.age)
        self._end_pause()
        if self._asleep == {"scheduling"}:
            self._asleep.clear()
            logger.info("awake")
        return {"status": "resumed"}

    # --- sleep ---

    @command("sleep")
    def sleep(self, level: int = 1, mode: str = "abort") -> Command:
        """0: only scheduling stops; 1: the KV cache's memory is given back; 2: the weights' as well."""
        if level not in range(len(LEVELS)):
            raise RequestError(f"level must be 0, 1 or 2, got {level}", field="level")
        yield from self._fall_asleep(LEVELS[level], ([], ["kv_cache"], ["kv_cache", "weights"])[level], mode)
        return {"status": "sleeping", "level": level}

    @command("release_memory")
    def release_memory(self, tags: list[str], mode: str = "abort") -> Command:
        """Give back only the memory that `tags` name, until `wake_up` has the same tags."""
        unknown = set(tags) - set(MEMORY)
        if unknown or not tags:
            raise RequestError(f"tags must be among {', '.join(MEMORY)}, got {sorted(unknown)}", field="tags")
        yield from self._fall_asleep([*tags, "scheduling"], sorted(tags), mode)
        return {"status": "sleeping"}

    def _fall_asleep(self, asleep: Iterable[str], released: list[str], mode: str) -> Command:
        """Stop scheduling, and give back the memory `released`; `asleep`: what has to wake up again."""
        if mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", field="mode")
        drops = "weights" in released
        if drops and self.weights.is_updating:
            raise Conflict("a weight update is open: finish or abort it before the weights are released")
        self._dropping += drops
        try:
            yield from self._quiesce(mode, "abort_pause")
            self._asleep.update(asleep)
            logger.info("asleep: %s (mode %s)", ", ".join(sorted(self._asleep)), mode)
            if released:
                self._release(released)
        finally:
            self._dropping -= drops

    @command("release_kv_cache_memory")
    def release_kv_cache_memory(self) -> Command:
        """Give back the KV cache's memory until `wake_up`; running requests are computed again then."""
        yield STEP_BOUNDARY
        self._asleep.add("kv_cache")
        self._release(["kv_cache"])
        return {"success": True}

    def _release(self, tags: list[str]) -> None:
        """Preempt all requests, then release the memory that `tags` name; at a step boundary."""
        self._scheduler.preempt_all()
        self._cache.reset()
        self._executor.call("release", {"tags": tags})
        self._releases += "kv_cache" in tags
        if "weights" in tags:
            self.weights.on_release()

    @command("wake_up")
    def wake_up(self, tags: Iterable[str] | None = None) -> Command:
        """Undo `sleep`, or parts of it.  When both memories are back, scheduling goes on too."""
        waking = set(tags or TAGS)
        unknown = waking - set(TAGS)
        if unknown:
            raise RequestError(f"tags must be among {', '.join(TAGS)}, got {min(unknown)!r}", field="tags")
        if not tags and self.weights.dropped:
            raise Conflict("there are no weights (sleep level 2 drops them): push some; tags=weights allows that")
        yield STEP_BOUNDARY
        restores = "kv_cache" in waking & self._asleep
        if restores:
            self._executor.call("restore", {"tags": ["kv_cache"]})
        releases = self._releases
        try:
            yield PREPARED
        except Conflict:
            if restores:
                self._executor.call("release", {"tags": ["kv_cache"]})
            raise
        if self._releases > releases:  # other commands have given the memory back meanwhile
            waking.discard("kv_cache")
        slept_deep = len(self._asleep) > 1 or self._asleep == {"kv_cache"}
        self._asleep -= waking
        if slept_deep and self._asleep == {"scheduling"}:
            self._asleep.clear()
        logger.info("awake, except for: %s" if self._asleep else "awake%s", ", ".join(sorted(self._asleep)))
        return {"status": "sleeping" if self.status().sleeping else "awake", "asleep": sorted(self._asleep)}

    # --- other calls of the executor ---

    @command("collective_rpc")
    def collective_rpc(
        self, method: str, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> Command:
        """Call a method of the worker extension between two steps; a result per worker."""
        yield STEP_BOUNDARY
        self.weights.note_worker_call()
        call = {"method": method, "args": args or [], "kwargs": kwargs or {}}
        return [self._executor.call("collective_rpc", call)]

    @command("apply_model")
    def apply_model(self, function: str) -> Command:
        """Call the function `module:name` with the model between two steps; a result per worker."""
        yield STEP_BOUNDARY
        self.weights.note_worker_call()
        return [self._executor.call("apply_model", {"function": function})]
