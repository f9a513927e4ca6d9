"""Whether steps are planned: the commands pause, sleep and wake_up, and the engine's state as front ends see it.

How weights are updated is in `weights`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from tokserve.engine.command import STEP_BOUNDARY, Command, RunningRequests
from tokserve.engine.prefix_cache import PrefixCache
from tokserve.engine.scheduler import Scheduler
from tokserve.engine.weights import Weights
from tokserve.errors import Conflict, RequestError
from tokserve.executor.base import Executor
from tokserve.messages import Status

MODES = ("abort", "wait", "keep")
TAGS = ("weights", "kv_cache", "scheduling")
LEVELS = (("scheduling",), TAGS, TAGS)  # what each sleep level puts to sleep


class Control:
    """`frozen`, `idle_is_fine` and `status` are for the core; `commands` is the table, with that of the weights."""

    def __init__(
        self,
        requests: RunningRequests,
        scheduler: Scheduler,
        cache: PrefixCache,
        executor: Executor,
        weight_version: str,
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self._weights = Weights(requests, scheduler, cache, executor, weight_version, lambda: not self._dropping)
        self._paused = False
        self._pausing = 0  # commands that are about to pause
        self._resumes = 0  # how often `resume` was called
        self._barriers: list[int] = []  # of commands that wait for requests to end
        self._asleep: set[str] = set()
        self._dropping = 0  # sleeps that are about to drop the weights
        self.since = time.time()  # of the state
        self._last_state = "running"
        self.commands: dict[str, Callable[..., Command]] = {
            "pause": self.pause,
            "resume": self.resume,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "release_kv_cache_memory": self.release_kv_cache_memory,
            "collective_rpc": self.collective_rpc,
            "apply_model": self.apply_model,
            **self._weights.commands,
        }

    # --- for the core ---

    @property
    def frozen(self) -> bool:
        """No step may be planned."""
        return self._paused or bool(self._asleep) or not self._weights.can_compute

    @property
    def idle_is_fine(self) -> bool:
        """Requests may wait although nothing runs."""
        return self.frozen or bool(self._barriers)

    @property
    def state(self) -> str:
        """running, pausing, paused, updating, sleeping or quarantined: the first that holds, from the last one on."""
        weights = self._weights
        if weights.quarantine is not None and weights.update is None:
            return "quarantined"
        if self._asleep:
            return "sleeping"
        if weights.update is not None:
            return "updating"
        if not weights.loaded:
            return "sleeping"
        if self._paused:
            return "paused"
        return "pausing" if self._pausing else "running"

    def status(self) -> Status:
        """The state for front ends."""
        state = self.state
        if state != self._last_state:
            self._last_state, self.since = state, time.time()
        weights, origin = self._weights, self._weights.origin
        sleeping = bool(self._asleep) or (weights.dropped and weights.quarantine is None)
        return Status(
            state, weights.version, weights.epoch, self._paused, sleeping, weights.quarantine, weights.failure,
            source=origin.source, stamp=origin.stamp, pushed=origin.pushed, lost=weights.lost,
            asleep=sorted(self._asleep), dropped=weights.dropped, checksum=weights.checksum,
        )  # fmt: skip

    # --- failover ---

    def take_over(self, was: Status) -> Command:
        """Failover: be paused and asleep as the engine before was, with its weights and its epoch."""
        yield STEP_BOUNDARY
        self._paused = was.paused
        self._asleep.update(was.asleep)
        memory = [*(tag for tag in was.asleep if tag == "kv_cache"), *(["weights"] if was.dropped else [])]
        if memory:
            self._release(memory)
        yield from self._weights.take_over(was)
        return {}

    # --- pause ---

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> Command:
        """Stop generating: `abort` ends what is in flight, `wait` lets it end, `keep` freezes it with its KV."""
        if mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", field="mode")
        resumes = self._resumes
        self._pausing += 1
        try:
            yield from self._quiet(mode, "abort_pause", lambda: self._resumes > resumes)
            if self._resumes > resumes:
                raise Conflict("resume was called before the pause was reached")
            self._paused = True
        finally:
            self._pausing -= 1
        if clear_cache:
            self._cache.reset()
        return {"status": "paused"}

    def _quiet(self, mode: str, reason: str, off: Callable[[], bool] = lambda: False) -> Command:
        """Until requests are treated as `mode` says and no step is in flight; `off`: stop waiting."""
        if mode == "abort":
            self._requests.end_all(reason)
        elif mode == "wait":
            yield from self._drained(off)
        yield STEP_BOUNDARY

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

    def resume(self) -> Command:
        """Go on; also ends a sleep of level 0.  Always succeeds."""
        yield from ()
        self._resumes += 1
        self._paused = False
        if self._asleep == {"scheduling"}:
            self._asleep.clear()
        return {"status": "resumed"}

    # --- sleep ---

    def sleep(self, level: int = 1, mode: str = "abort") -> Command:
        """0: only scheduling stops; 1: the KV cache's memory is given back; 2: the weights' as well."""
        if level not in range(len(LEVELS)):
            raise RequestError(f"level must be 0, 1 or 2, got {level}", field="level")
        if mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", field="mode")
        if level == 2 and self._weights.update is not None:
            raise Conflict("a weight update is open: finish or abort it before sleeping at level 2")
        self._dropping += level == 2
        try:
            yield from self._quiet(mode, "abort_pause")
            self._asleep.update(LEVELS[level])
            if level:
                self._release(["kv_cache", "weights"] if level == 2 else ["kv_cache"])
        finally:
            self._dropping -= level == 2
        return {"status": "sleeping", "level": level}

    def release_kv_cache_memory(self) -> Command:
        """Give back the KV cache's memory until `wake_up`; running requests are computed again then."""
        yield STEP_BOUNDARY
        self._asleep.add("kv_cache")
        self._release(["kv_cache"])
        return {"success": True}

    def _release(self, tags: list[str]) -> None:
        """At a step boundary: preempt all requests, then release the memory that `tags` name."""
        self._scheduler.preempt_all()
        self._cache.reset()
        self._executor.call("release", {"tags": tags})
        if "weights" in tags:
            self._weights.loaded = False

    def wake_up(self, tags: Iterable[str] | None = None) -> Command:
        """Undo `sleep`, or parts of it.  When both memories are back, scheduling goes on too."""
        waking = set(tags or TAGS)
        unknown = waking - set(TAGS)
        if unknown:
            raise RequestError(f"tags must be among {', '.join(TAGS)}, got {min(unknown)!r}", field="tags")
        if not tags and self._weights.dropped:
            raise Conflict("there are no weights (sleep level 2 drops them): push some; tags=weights allows that")
        yield STEP_BOUNDARY
        if "kv_cache" in waking & self._asleep:
            self._executor.call("restore", {"tags": ["kv_cache"]})
        slept_deep = len(self._asleep) > 1 or self._asleep == {"kv_cache"}
        self._asleep -= waking
        if slept_deep and self._asleep == {"scheduling"}:
            self._asleep.clear()
        return {"status": "awake" if not self._asleep else "sleeping", "asleep": sorted(self._asleep)}

    # --- other calls of the executor ---

    def collective_rpc(
        self, method: str, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> Command:
        """Call a method of the worker extension between two steps; a result per worker."""
        yield STEP_BOUNDARY
        self._weights.note_worker_call()
        call = {"method": method, "args": args or [], "kwargs": kwargs or {}}
        return [self._executor.call("collective_rpc", call)]

    def apply_model(self, function: str) -> Command:
        """Call the function `module:name` with the model between two steps; a result per worker."""
        yield STEP_BOUNDARY
        self._weights.note_worker_call()
        return [self._executor.call("apply_model", {"function": function})]
