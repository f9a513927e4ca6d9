"""Whether steps are planned and with which weights: pause, sleep, and the weight update as a transaction.

Every verb is a generator.  It yields what it waits for (`STEP_BOUNDARY`, a future, or a condition) and returns its
reply; the core resumes it between steps.  So a verb reads from top to bottom, holds up nobody else, and its caller
is answered when the state it asked for is there.  Knows no messages, no sockets and no tensors: the executor stages
weights, and here is decided when they count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokserve.engine.cache import Cache
from tokserve.engine.request import Request
from tokserve.engine.scheduler import Scheduler
from tokserve.errors import Conflict, RequestError
from tokserve.executor.base import Executor
from tokserve.messages import Status

STEP_BOUNDARY = None  # no step is in flight, and none is planned before the verb goes on
Wait = Future[Any] | Callable[[], bool] | None
Verb = Generator[Wait, None, Any]

MODES = ("abort", "wait", "keep")
TAGS = ("weights", "kv_cache", "scheduling")
LEVELS = (("scheduling",), TAGS, TAGS)  # what each sleep level puts to sleep
MAX_VERSION = 256


@dataclass(slots=True, frozen=True)
class Origin:
    """Where weights came from: the directory `source`, with its files in the state `stamp`; `pushed`: in a way that
    cannot be gone again, over a wire or by a worker call; none of these: the checkpoint of the start."""

    source: str | None = None
    stamp: str | None = None
    pushed: bool = False


@dataclass(slots=True, eq=False)
class Update:
    """An open weight update.  `in_place`: the old weights are gone, so there is nothing to fall back to.
    `closed`: nothing more may come, or it is the whole one of a single call.  `source`: the directory that its tensors
    come from, if they come from one, and `stamp` the state of its files.  `streams`: the safetensors bodies that belong
    to it, by name; one that began before it, or beside another update, does not."""

    in_place: bool = False
    closed: bool = False
    source: str | None = None
    stamp: str | None = None
    streams: set[str] = field(default_factory=set)


class Requests(Protocol):
    """The core's side: the requests that have not ended."""

    @property
    def live(self) -> Iterable[Request]:
        """All of them."""

    @property
    def num_received(self) -> int:
        """The number the next request will get."""

    def end_all(self, reason: str) -> None:
        """End them now, with what they have."""


class Control:
    """See the module.  `frozen`, `idle_is_fine` and `status` tell the core what to do; `verbs` is the table."""

    def __init__(
        self, requests: Requests, scheduler: Scheduler, cache: Cache, executor: Executor, weight_version: str
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self._version = weight_version
        self._epoch = 0
        self._paused = False
        self._pausing = 0  # verbs that are about to pause
        self._resumes = 0  # how often `resume` was called
        self._barriers: list[int] = []  # of verbs that wait for requests to end
        self._asleep: set[str] = set()
        self._has_weights = True
        self._dropping = 0  # sleeps that are about to drop the weights
        self._update: Update | None = None
        self._meeting = 0  # verbs that wait for a trainer
        self._quarantine: str | None = None
        self._lost = False  # it is only that other weights should be here
        self._failure: str | None = None  # of the last update
        self._origin = Origin()  # of the weights that have the version
        self._touched = False  # a worker call may have changed the weights since they came
        self.since = time.time()  # of the state
        self._last_state = "running"
        self.verbs: dict[str, Callable[..., Verb]] = {
            "pause": self.pause,
            "resume": self.resume,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "release_kv_cache_memory": self.release_kv_cache_memory,
            "init_weight_transfer_engine": self.init_weight_transfer_engine,
            "shutdown_weight_transfer_engine": self.shutdown_weight_transfer_engine,
            "start_weight_update": self.start_weight_update,
            "update_weights": self.update_weights,
            "begin_weight_stream": self.begin_weight_stream,
            "feed_weights": self.feed_weights,
            "update_weights_from_dir": self.update_weights_from_dir,
            "finish_weight_update": self.finish_weight_update,
            "abort_weight_update": self.abort_weight_update,
            "update_weight_version": self.update_weight_version,
            "weight_checksums": self.weight_checksums,
            "collective_rpc": self.collective_rpc,
            "apply_model": self.apply_model,
        }

    # --- what the core asks ---

    @property
    def frozen(self) -> bool:
        """No step may be planned."""
        return self._paused or self._blocked

    @property
    def _blocked(self) -> bool:
        """No step could be computed, paused or not."""
        in_place = self._update is not None and self._update.in_place
        return bool(self._asleep) or not self._has_weights or in_place or self._quarantine is not None

    @property
    def _dropped(self) -> bool:
        """There are no weights: a sleep has cost them, or could not be read again, and no others have come."""
        in_place = self._update is not None and self._update.in_place
        return not (self._has_weights or in_place or (self._quarantine is not None and not self._lost))

    @property
    def idle_is_fine(self) -> bool:
        """Requests may wait although nothing runs."""
        return self.frozen or bool(self._barriers)

    @property
    def state(self) -> str:
        """running, pausing, paused, updating, sleeping or quarantined: the first that holds, from the last one on."""
        if self._quarantine is not None and self._update is None:
            return "quarantined"
        if self._asleep:
            return "sleeping"
        if self._update is not None:
            return "updating"
        if not self._has_weights:
            return "sleeping"
        if self._paused:
            return "paused"
        return "pausing" if self._pausing else "running"

    def status(self) -> Status:
        """What front ends must know."""
        state = self.state
        if state != self._last_state:
            self._last_state, self.since = state, time.time()
        origin = self._origin
        sleeping = bool(self._asleep) or (self._dropped and self._quarantine is None)
        return Status(
            state, self._version, self._epoch, self._paused, sleeping,
            self._quarantine, self._failure, source=origin.source, stamp=origin.stamp, pushed=origin.pushed,
            lost=self._lost, asleep=sorted(self._asleep), dropped=self._dropped,
        )  # fmt: skip

    # --- in another engine's place ---

    def take_over(self, was: Status) -> Verb:
        """Be paused and asleep as an engine was that has ended, with its weights and its epoch.  Weights that cannot be
        had again are not replaced by others: nothing is served then."""
        yield STEP_BOUNDARY
        self._paused = was.paused
        self._asleep.update(was.asleep)
        memory = [*(tag for tag in was.asleep if tag == "kv_cache"), *(["weights"] if was.dropped else [])]
        if memory:
            self._release(memory)
        gone = ""
        if not was.dropped:
            gone = "they came in no files" if was.pushed else (yield from self._read_again(was))
        if gone:
            self._quarantine = (
                f"the engine was replaced, and the weights of version {was.weight_version} could not be had again "
                f"({gone}): push weights"
            )
            self._lost = True
            self._renew(self._version, Origin(), was.epoch + 1)
        elif self._epoch != was.epoch:
            self._renew(was.weight_version, Origin(was.source, was.stamp, was.pushed), was.epoch)
        if was.lost:
            self._quarantine, self._lost = was.quarantine, True
        self._failure = "the engine ended while it was open" if was.state == "updating" else was.failure
        return {}

    def _read_again(self, was: Status) -> Generator[Wait, None, str]:
        """Load the weights of a directory, if they came from one; why that cannot be, or ""."""
        if was.source is None:
            return ""
        try:
            update = yield from self._open(closed=True)
            update.source = was.source
            update.stamp = yield from self._staged(update, "receive_update", source={"weight_dir": was.source})
            if update.stamp != was.stamp:
                self._fail(update, f"the files in {was.source} have changed since they were read")
                yield from self._background("abort_update")
                return self._failure or ""
            yield from self._commit(update, was.weight_version, was.epoch)
        except RequestError as error:
            return error.message
        return ""

    # --- pause ---

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> Verb:
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

    def _quiet(self, mode: str, reason: str, off: Callable[[], bool] = lambda: False) -> Verb:
        """Until nothing is computed and what `mode` says has become of the requests; `off`: give up waiting."""
        if mode == "abort":
            self._requests.end_all(reason)
        elif mode == "wait":
            yield from self._drained(off)
        yield STEP_BOUNDARY

    def _drained(self, off: Callable[[], bool]) -> Verb:
        """Until the requests received so far have ended; later ones wait.  If nothing can run, so be it."""
        last = self._requests.num_received
        self._barriers.append(last)
        try:
            self._scheduler.barrier = min(self._barriers)
            yield lambda: self.frozen or off() or all(request.number >= last for request in self._requests.live)
        finally:
            self._barriers.remove(last)
            self._scheduler.barrier = min(self._barriers, default=None)

    def resume(self) -> Verb:
        """Go on; also ends a sleep of level 0.  Always succeeds."""
        yield from ()
        self._resumes += 1
        self._paused = False
        if self._asleep == {"scheduling"}:
            self._asleep.clear()
        return {"status": "resumed"}

    # --- sleep ---

    def sleep(self, level: int = 1, mode: str = "abort") -> Verb:
        """0: only scheduling stops; 1: the KV cache's memory is given back; 2: the weights' as well."""
        if level not in range(len(LEVELS)):
            raise RequestError(f"level must be 0, 1 or 2, got {level}", field="level")
        if mode not in MODES:
            raise RequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}", field="mode")
        if level == 2 and self._update is not None:
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

    def release_kv_cache_memory(self) -> Verb:
        """Give back the KV cache's memory until `wake_up`; running requests are computed again then."""
        yield STEP_BOUNDARY
        self._asleep.add("kv_cache")
        self._release(["kv_cache"])
        return {"success": True}

    def _release(self, tags: list[str]) -> None:
        """At a step boundary: nobody holds KV any more, then the device lets go of what `tags` name."""
        self._scheduler.preempt_all()
        self._cache.reset()
        self._executor.call("release", {"tags": tags})
        if "weights" in tags:
            self._has_weights = False

    def wake_up(self, tags: Iterable[str] | None = None) -> Verb:
        """Undo `sleep`, or parts of it.  When both memories are back, scheduling goes on too."""
        wanted = set(tags or TAGS)
        unknown = wanted - set(TAGS)
        if unknown:
            raise RequestError(f"tags must be among {', '.join(TAGS)}, got {min(unknown)!r}", field="tags")
        if not tags and self._dropped:
            raise Conflict("there are no weights (sleep level 2 drops them): push some; tags=weights allows that")
        yield STEP_BOUNDARY
        if "kv_cache" in wanted & self._asleep:
            self._executor.call("restore", {"tags": ["kv_cache"]})
        slept_deep = len(self._asleep) > 1 or self._asleep == {"kv_cache"}
        self._asleep -= wanted
        if slept_deep and self._asleep == {"scheduling"}:
            self._asleep.clear()
        return {"status": "awake" if not self._asleep else "sleeping", "asleep": sorted(self._asleep)}

    # --- weights ---

    def init_weight_transfer_engine(self, options: dict[str, Any]) -> Verb:
        """Prepare a backend: for gloo and nccl, meet the trainer."""
        if self._update is not None:
            raise Conflict("a weight update is open: finish or abort it first")
        self._give_up_meeting()
        self._meeting += 1
        try:
            return (yield from self._background("init_weight_transfer", options=options))
        finally:
            self._meeting -= 1

    def _give_up_meeting(self) -> None:
        """A trainer that is still waited for will not come any more."""
        if self._meeting:
            self._executor.interrupt()

    def shutdown_weight_transfer_engine(self) -> Verb:
        """Let go of the backend; an open update is rolled back."""
        if self._update is not None:
            yield from self.abort_weight_update()
        self._give_up_meeting()
        return (yield from self._background("shutdown_weight_transfer"))

    def start_weight_update(self, is_checkpoint_format: bool = True) -> Verb:
        """Open a transaction: what comes is staged beside the weights that serve."""
        if not is_checkpoint_format:
            raise RequestError("only checkpoint format is supported", field="is_checkpoint_format")
        yield from self._open()
        return {"message": "Weight update started"}

    def _open(self, closed: bool = False) -> Generator[Wait, None, Update]:
        yield lambda: self._update is not None or not self._dropping  # what it stages beside is settled then
        if self._update is not None:
            raise Conflict("a weight update is open already: finish or abort it first")
        self._update = update = Update(closed=closed)
        beside = yield from self._staged(update, "begin_update", have_weights=self._has_weights)
        if not beside:
            yield STEP_BOUNDARY
            self._check_open(update)
            update.in_place = True
            self._executor.call("release", {"tags": ["weights"]})
            self._has_weights = False
        return update

    def update_weights(self, update: dict[str, Any]) -> Verb:
        """Stage the tensors that `update` announces (names, dtypes, shapes, and where they are)."""
        opened = self._filling()
        opened.source = update.get("weight_dir", update.get("path"))
        opened.stamp = yield from self._staged(opened, "receive_update", source=update)
        return {"message": "Weights updated"}

    def begin_weight_stream(self, stream: str) -> Verb:
        """What comes under this name belongs to the update that is open now, and to no later one."""
        self._filling().streams.add(stream)
        yield from ()
        return {}

    def feed_weights(self, stream: str, chunk: bytes, last: bool = False, broken: bool = False) -> Verb:
        """Stage a piece of a safetensors file; pieces of one file carry the same `stream`.  `broken`: no more come."""
        opened = self._filling()
        if stream not in opened.streams:
            raise Conflict("the weight update that this body belongs to has ended")
        opened.source = None
        yield from self._staged(opened, "feed_update", stream=stream, chunk=chunk, last=last, broken=broken)
        return {"message": "Weights updated"}

    def update_weights_from_dir(self, weight_dir: str, weight_version: str | None = None) -> Verb:
        """A whole update from a checkpoint directory."""
        self._check_version(weight_version)
        update = yield from self._open(closed=True)
        update.source = weight_dir
        update.stamp = yield from self._staged(update, "receive_update", source={"weight_dir": weight_dir})
        return (yield from self._commit(update, weight_version))

    def finish_weight_update(self, weight_version: str | None = None) -> Verb:
        """Commit at a step boundary what was staged; `weight_version`: by default the new epoch."""
        self._check_version(weight_version)
        return (yield from self._commit(self._filling(weight_version), weight_version))

    def _commit(self, update: Update, weight_version: str | None, epoch: int | None = None) -> Verb:
        update.closed = True
        yield from self._staged(update, "finish_update")
        yield STEP_BOUNDARY
        self._check_open(update)
        committed = False
        try:
            self._executor.call("commit_update", {})
            committed = True
        finally:
            if not committed:  # the swap may have happened: what is there now has no name
                update.in_place = True
                self._fail(update, "the new weights could not take effect; the engine's log says more")
                yield from self._background("forget_weights")
        self._update = None
        self._has_weights = True
        self._quarantine = self._failure = None
        self._lost = self._touched = False
        self._renew(weight_version, Origin(update.source, update.stamp, pushed=update.source is None), epoch)
        done = {"message": "Weight update finished", "weight_version": self._version, "epoch": self._epoch}
        yield from self._background("forget_weights")
        return done

    def _renew(self, weight_version: str | None, origin: Origin, epoch: int | None = None) -> None:
        """What is computed from here on belongs to a new epoch; KV of the old one is never found again."""
        self._epoch = self._epoch + 1 if epoch is None else epoch
        self._origin = origin
        self._version = str(self._epoch) if weight_version is None else weight_version
        self._cache.renew(self._epoch)
        self._scheduler.use_weights(self._version, self._epoch)

    def abort_weight_update(self) -> Verb:
        """Roll back: what was staged is dropped, even what is still coming."""
        update = self._opened()
        self._fail(update, "the weight update was aborted")
        self._executor.interrupt()
        yield from self._background("abort_update")
        return {"message": "Weight update aborted"}

    def update_weight_version(self, new_version: str) -> Verb:
        """Name the weights that serve.  A new epoch too: they may have been changed behind our back.  After `take_over`
        it says that those that are there are the right ones."""
        self._check_version(new_version, "new_version")
        if self._update is not None:
            raise Conflict("a weight update is open: finish or abort it first")
        yield STEP_BOUNDARY
        self._renew(new_version, Origin(pushed=True) if self._touched else self._origin)
        if self._lost and self._has_weights:
            self._quarantine, self._lost = None, False
        return {"success": True, "new_version": new_version, "epoch": self._epoch}

    def weight_checksums(self) -> Verb:
        """Digests of the weights in memory, by place."""
        if not self._has_weights:
            raise Conflict("there are no weights to look at now")
        return (yield from self._background("checksums"))

    def _check_version(self, version: str | None, field: str = "weight_version") -> None:
        if version is not None and not 0 < len(version) <= MAX_VERSION:
            raise RequestError(f"a weight version must have 1 to {MAX_VERSION} characters", field=field)

    def _opened(self, weight_version: str | None = None) -> Update:
        """`weight_version`: what it is to make."""
        if self._update is None:
            last = f"; the last one failed: {self._failure}" if self._failure else ""
            if weight_version is not None and weight_version == self._version:
                last = f"; weights of version {weight_version} serve already"
            raise Conflict(f"no weight update is open: start one first{last}")
        return self._update

    def _filling(self, weight_version: str | None = None) -> Update:
        """The open update, unless nothing more may come: what does so all the same does not touch it."""
        opened = self._opened(weight_version)
        if opened.closed:
            raise Conflict("the weight update is closed: it is being committed, or comes from a directory as a whole")
        return opened

    def _check_open(self, update: Update) -> None:
        if self._update is not update:
            raise Conflict(self._failure or "the weight update was aborted")

    def _staged(self, update: Update, method: str, **args: Any) -> Generator[Wait, None, Any]:
        """A call that stages; if it fails, the whole update is rolled back and the error goes to the caller."""
        future = self._executor.background(method, args)
        yield future
        self._check_open(update)
        error = future.exception()
        if error is not None:
            known = isinstance(error, RequestError)
            self._fail(update, str(error) if known else f"{type(error).__name__} in the engine; its log says more")
            yield from self._background("abort_update")
        return future.result()

    def _fail(self, update: Update, reason: str) -> None:
        """The update is over.  If it has cost the old weights, nothing can be served until another one succeeds."""
        self._update = None
        self._failure = reason
        if update.in_place:
            self._quarantine = f"a weight update failed when the old weights were gone already: {reason}"
            self._requests.end_all("abort_quarantine")

    def _background(self, method: str, **args: Any) -> Generator[Wait, None, Any]:
        """Call the executor beside the steps; raises what it raises."""
        future = self._executor.background(method, args)
        yield future
        return future.result()

    # --- other calls of the executor ---

    def collective_rpc(self, method: str, args: list[Any] | None = None, kwargs: dict[str, Any] | None = None) -> Verb:
        """Call a method of the worker extension between two steps; a result per worker."""
        yield STEP_BOUNDARY
        asked = {"method": method, "args": args or [], "kwargs": kwargs or {}}
        self._touched = True
        return [self._executor.call("collective_rpc", asked)]

    def apply_model(self, function: str) -> Verb:
        """Call the function `module:name` with the model between two steps; a result per worker."""
        yield STEP_BOUNDARY
        self._touched = True
        return [self._executor.call("apply_model", {"function": function})]
