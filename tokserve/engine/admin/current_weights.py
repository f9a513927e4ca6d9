"""Which weights serve: their version and epoch, where they came from, and whether they are in memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tokserve.engine.admin.command import Command, RunningRequests, Wait
from tokserve.engine.admin.states import WEIGHTS, Region
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.scheduler import Scheduler
from tokserve.executor.base import Executor
from tokserve.protocol.messages import Status


@dataclass(slots=True, frozen=True)
class Origin:
    """Where weights came from: the directory `source`, with its files in the state `stamp`; `pushed`: over a wire or by
    a worker call, so they cannot be read again; none of these: the checkpoint of the start."""

    source: str | None = None
    stamp: str | None = None
    pushed: bool = False


class CurrentWeights:
    """The weights of the start.  A room may have others, that are updated while requests run."""

    def __init__(
        self,
        requests: RunningRequests,
        scheduler: Scheduler,
        cache: PrefixCache,
        executor: Executor,
        version: str,
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self.version = version
        self.epoch = 0
        self._memory = Region(WEIGHTS, "loaded")
        self.quarantine: str | None = None  # why nothing can be served
        self.origin = Origin()  # of the weights that have the version
        self.modified_by_rpc = False  # a worker call may have changed the weights since
        self.checksum: str | None = None  # of all weights, if it is known
        self._num_changes = 0  # of the weights, for certain or perhaps
        self.on_change: Callable[[], None] = lambda: None  # called at each of them
        self._foreign_generation = -1  # of the prefix cache, when a worker call came last
        self.failure: str | None = None  # of the last update

    @property
    def can_compute(self) -> bool:
        """Whether a step can be computed with them."""
        return self._memory.state == "loaded"

    @property
    def are_clean(self) -> bool:
        """Whether there are weights, and all KV that the prefix cache may find is theirs: no worker call has changed
        them since."""
        return self.can_compute and self._cache.generation > self._foreign_generation

    @property
    def loaded(self) -> bool:
        """Whether there are weights in memory, the right ones or not."""
        return self._memory.state in ("loaded", "mismatched", "torn")

    @property
    def lost(self) -> bool:
        """Whether other weights should be here, which is the only reason for the quarantine."""
        return self._memory.state in ("mismatched", "missing")

    @property
    def dropped(self) -> bool:
        """Whether there are no weights: a sleep released them, or they could not be read again, and no others were
        pushed."""
        return self._memory.state in ("dropped", "missing")

    @property
    def is_updating(self) -> bool:
        """Whether an update is open."""
        return False

    @property
    def seconds_to_expiry(self) -> float | None:
        """Until the open update is rolled back, if its holder stays silent; None: it will not be."""
        return None

    def expire(self) -> bool:
        """Roll the open update back if its holder has been silent for too long; whether it was."""
        return False

    def on_release(self) -> None:
        self._memory.fire("release")

    def note_worker_call(self) -> None:
        self.modified_by_rpc = True
        self.checksum = None
        self._note_change()
        self._foreign_generation = self._cache.generation

    def _note_change(self) -> None:
        self._num_changes += 1
        self.on_change()

    def _set_epoch(self, weight_version: str | None, origin: Origin, epoch: int | None = None) -> None:
        """Begin a new epoch: KV of the old one is never found again."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self.origin = origin
        self.version = str(self.epoch) if weight_version is None else weight_version
        self._note_change()
        self._cache.set_epoch(self.epoch)
        self._scheduler.weights.use(self.version, self.epoch)
        self._scheduler.restart_prompts()

    def take_over(self, was: Status) -> Command:
        """Failover: be the weights of the engine before, and of its epoch.  If they cannot be read again, nothing is
        served."""
        reason = ""
        if not was.dropped:
            reason = "they were pushed, not read from files" if was.pushed else (yield from self._read_again(was))
        if reason:
            self.quarantine = (
                f"the engine was replaced, and the weights of version {was.weight_version} could not be restored "
                f"({reason}): push weights"
            )
            self._memory.fire("mismatch")
            self._set_epoch(self.version, Origin(), was.epoch + 1)
        elif self.epoch != was.epoch:
            self._set_epoch(was.weight_version, Origin(was.source, was.stamp, was.pushed), was.epoch)
        if was.lost:
            self.quarantine = was.quarantine
            self._memory.fire("mismatch")
        self.failure = "the engine ended while the weight update was open" if was.state == "updating" else was.failure

    def _read_again(self, was: Status) -> Generator[Wait, Any, str]:
        """Load the weights of a directory, if they came from one; returns why that failed, or ""."""
        yield from ()
        return "" if was.source is None else "this server reads weights at its start only"

    def recompute_kv(self) -> None:
        """Take the KV from all requests at a step boundary; nothing of it is found again in this epoch."""
        self._scheduler.preempt_all()
        for request in self._requests.live:
            request.restart_prompt()

    def _background(self, method: str, **args: Any) -> Generator[Wait, Any, Any]:
        """Call the executor's background thread; raises what it raises."""
        future = self._executor.background(method, args)
        yield future
        return future.result()
