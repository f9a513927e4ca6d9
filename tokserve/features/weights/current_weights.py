"""Which weights serve: their version and epoch, where they came from, and the commands that look at them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from tokserve.base.errors import Conflict
from tokserve.engine.admin.command import Command, Wait, command
from tokserve.engine.admin.states import WEIGHTS, Region
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.scheduler import Scheduler
from tokserve.executor.base import Executor
from tokserve.features.weights.update import Origin, VersionHistory


class CurrentWeights:
    """What `features/weights/commands` changes, and others read."""

    def __init__(self, scheduler: Scheduler, cache: PrefixCache, executor: Executor, version: str) -> None:
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
        self._history = VersionHistory()

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

    def _set_checksum(self, checksum: str | None) -> None:
        """What the weights that serve have; None: it is not known."""
        self.checksum = checksum
        self._history.add(self.version, checksum)

    def _background(self, method: str, **args: Any) -> Generator[Wait, Any, Any]:
        """Call the executor's background thread; raises what it raises."""
        future = self._executor.background(method, args)
        yield future
        return future.result()

    # --- commands ---

    @command("weight_checksums")
    def weight_checksums(self) -> Command:
        """Digests of the weights in memory, by name."""
        if not self.loaded:
            raise Conflict("there are no weights to look at now")
        return (yield from self._background("checksums"))

    @command("checkpoint_checksums")
    def checkpoint_checksums(self) -> Command:
        """Checksums of the tensors that the weights were loaded from: {"checkpoint": by name, "tied": aliases}."""
        if not self.loaded:
            raise Conflict("there are no weights to look at now")
        if self.modified_by_rpc:
            raise Conflict("a worker call may have changed the weights since they were loaded")
        return (yield from self._background("checkpoint_checksums"))

    @command("weights_checksum")
    def weights_checksum(self) -> Command:
        """The checksum of all weights; computed if it is not known."""
        if not self.loaded:
            raise Conflict("there are no weights to look at now")
        if self.checksum is None:
            num_changes = self._num_changes
            checksum = yield from self._background("weights_checksum")
            if self._num_changes != num_changes:
                return (yield from self.weights_checksum())
            self._set_checksum(checksum)
        return self.checksum

    @command("weight_coordinates")
    def weight_coordinates(self) -> Command:
        """The tensors in which deltas count elements."""
        return (yield from self._background("weight_coordinates"))
