"""The commands that update the weights, each update a transaction.

New weights are staged by the executor beside those that serve, and take effect at a step boundary, or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tokserve.base.errors import Conflict, RequestError
from tokserve.engine.admin.command import PREPARED, STEP_BOUNDARY, Command, Wait, command
from tokserve.engine.admin.current_weights import CurrentWeights, Origin
from tokserve.engine.admin.lease import Lease, check_lease
from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.features.lora.commands import LoadHooks, PushedSource
from tokserve.features.weights.update import Update, VersionHistory, check_version
from tokserve.protocol.commands import RANDOM_SEED
from tokserve.protocol.messages import Status

logger = logging.getLogger(__name__)


def make(context: EngineContext) -> EngineFeature:
    """The updates of an engine's weights."""
    weights = Weights(context)
    context.control.use_weights(weights)
    return UpdatedWeights(weights)


class UpdatedWeights(EngineFeature):
    """Has no hooks: weights change between steps, by commands."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    @property
    def commands(self) -> Sequence[object]:
        return (self.weights,)


class Weights(CurrentWeights):
    """The weights that serve, and the open update."""

    def __init__(self, context: EngineContext) -> None:
        version = context.facts.weight_version
        super().__init__(context.requests, context.scheduler, context.cache, context.executor, version)
        self._control = context.control
        self._offers = context.offers
        self._default_lease = context.config.weights.control_lease
        self._clock = context.clock
        self.update: Update | None = None  # that is open
        self._meeting = 0  # commands that wait for a trainer
        self._history = VersionHistory()

    def _new_lease(self, seconds: float | None) -> Lease:
        """A lease of so many seconds, or of the default."""
        return Lease(self._default_lease if seconds is None else seconds, self._clock)

    def _is_settled(self) -> bool:
        """Whether no sleep is about to drop the weights."""
        return self._control.is_settled

    def _read_again(self, was: Status) -> Generator[Wait, Any, str]:
        if was.source is None:
            return ""
        try:
            plan = yield from self._planned(was.source, was.weight_version)
            update, _ = yield from self._open_directory(was.source, was.weight_version, plan)
            if update.stamp != was.stamp:
                self._fail(update, f"the files in {was.source} have changed since they were read")
                yield from self._background("abort_update")
                return self.failure or ""
            yield from self._commit(update, was.weight_version, was.epoch)
        except RequestError as error:
            return error.message
        return ""

    # --- whose update is open ---

    @property
    def is_updating(self) -> bool:
        return self.update is not None

    @property
    def seconds_to_expiry(self) -> float | None:
        return None if self.update is None or self.update.closed else self.update.lease.seconds_left

    def expire(self) -> bool:
        if self.update is None or self.seconds_to_expiry != 0.0:
            return False
        lease = self.update.lease
        self._fail(self.update, f"no call came for {lease.silence:.0f} s (its lease is {lease.seconds:g} s)")
        self._executor.background("abort_update", {})  # the next update's calls come after it
        return True

    def _until_closed(self, take_over: bool) -> Generator[Wait, Any, None]:
        """Until no update is open; one that is open is a conflict, unless it is to be taken over."""
        while take_over and self.update is not None:
            update = self.update
            if update.closed:  # it needs nothing more of its holder
                yield self._has_ended(update)
            else:
                yield from self._roll_back(update, "another client took over")
        if self.update is not None:
            raise Conflict(self._open_message(self.update), code="update_open")

    def _has_ended(self, update: Update) -> Callable[[], bool]:
        return lambda: self.update is not update

    def _open_message(self, update: Update) -> str:
        lease = update.lease
        if update.closed:
            return f"a weight update is open already, for {lease.age:.0f} s: it is being committed"
        left = lease.seconds_left
        return (
            f"a weight update is open already: for {lease.age:.0f} s, last heard of {lease.silence:.0f} s ago; finish "
            'or abort it first (POST /abort_weight_update), or take over from its holder with "take_over": true'
            + ("" if left is None else f"; it is rolled back in {left:.0f} s if nothing more is heard of it")
        )

    def _roll_back(self, update: Update, reason: str) -> Generator[Wait, Any, None]:
        """Drop what was staged for an update, and what is still coming."""
        self._fail(update, reason)
        if update.lease.in_use:
            self._executor.interrupt()
        yield from self._background("abort_update")

    # --- commands ---

    @command("init_weight_transfer_engine")
    def init_weight_transfer_engine(self, options: dict[str, Any], take_over: bool = False) -> Command:
        """Prepare a backend: for gloo and nccl, meet the trainer."""
        yield from self._until_closed(take_over)
        self._stop_meeting()
        self._meeting += 1
        try:
            return (yield from self._background("init_weight_transfer", options=options))
        finally:
            self._meeting -= 1

    def _stop_meeting(self) -> None:
        """Stop waiting for a trainer."""
        if self._meeting:
            self._executor.interrupt()

    @command("shutdown_weight_transfer_engine")
    def shutdown_weight_transfer_engine(self) -> Command:
        """Close the backend; an open update is rolled back."""
        if self.update is not None and self.update.decided:
            yield self._has_ended(self.update)
        if self.update is not None:
            yield from self.abort_weight_update()
        self._stop_meeting()
        yield from self._background("shutdown_weight_transfer")
        return {"message": "Weight transfer shut down"}

    @command("start_weight_update")
    def start_weight_update(
        self,
        is_checkpoint_format: bool = True,
        base_version: str | None = None,
        base_checksum: str | None = None,
        lease: float | None = None,
        take_over: bool = False,
        lora_name: str | None = None,
        lora_config: dict[str, Any] | None = None,
    ) -> Command:
        """Open a transaction: new weights are staged beside those that serve.

        With the base of a delta: changes of the weights that serve, which must be of that version and checksum.
        `lease`: seconds without a call of this update after which it is rolled back; 0: never.  `take_over`: roll back
        an update that is open.  `lora_config`: the tensors are those of an adapter with this adapter_config.json, which
        gets the name `lora_name` (None: the model's own).
        """
        check_lease(lease)
        if lora_name is not None and lora_config is None:
            raise RequestError("lora_config is missing: an adapter needs its adapter_config.json", field="lora_config")
        if (base_version is None) != (base_checksum is None):
            raise RequestError("a delta needs both base_version and base_checksum", field="base_checksum")
        yield lambda: self.update is not None or self._is_settled()
        yield from self._until_closed(take_over)
        if lora_config is not None:
            base = None if base_version is None else {"version": base_version, "checksum": base_checksum}
            update = yield from self._open_adapter(lora_name, lora_config, base, lease)
        elif base_version is None or base_checksum is None:
            update = yield from self._open(lease=lease)
        else:
            update = yield from self._open_delta(base_version, base_checksum, lease=lease)
        return {"message": "Weight update started", "update_id": update.update_id}

    def _open_delta(
        self, version: str, checksum: str, closed: bool = False, lease: float | None = None
    ) -> Generator[Wait, Any, Update]:
        yield lambda: self.update is not None or self._is_settled()
        yield from self._until_closed(take_over=False)
        if not self.can_compute:
            raise Conflict(
                "there are no weights that a delta could change: push full weights",
                field="base_version",
                code="base_mismatch",
            )
        self.update = update = Update(self._new_lease(lease), closed=closed, is_delta=True)
        base = {"version": self.version, "base_version": version, "base_checksum": checksum}
        yield from self._staged(update, "begin_delta", **base)
        yield from self._prepared(update)
        return update

    def _open_adapter(
        self, name: str | None, config: dict[str, Any], base: dict[str, Any] | None, lease: float | None
    ) -> Generator[Wait, Any, Update]:
        """Open an update that takes the tensors of an adapter, or, with a base, changes of those pushed last."""
        adapter, served = self._offers["begin_adapter"](name)
        if name is None and not self.can_compute:
            raise Conflict("there are no weights that an adapter could change: push full weights", field="lora_config")
        self.update = update = Update(self._new_lease(lease), is_delta=base is not None, adapter=adapter)
        update.is_model = name is None
        changed = None if base is None else served | base
        yield from self._staged(update, "begin_adapter", key=update.update_id, config=config, base=changed)
        yield from self._prepared(update)
        return update

    def _planned(
        self, weight_dir: str, version: str | None, take_over: bool = False
    ) -> Generator[Wait, Any, dict[str, Any] | None]:
        """What a directory holds: None for a checkpoint, else as `plan_chain` says."""
        yield from self._until_closed(take_over)
        args = {"weight_dir": weight_dir, "version": version, "served_version": self.version}
        return (yield from self._background("plan_chain", **args))

    def _open_directory(
        self, weight_dir: str, version: str | None, plan: dict[str, Any] | None
    ) -> Generator[Wait, Any, tuple[Update, str | None]]:
        """Open an update, and stage all that comes: a checkpoint, or the files that lead to a version; and that."""
        source: dict[str, Any] = {"weight_dir": weight_dir}
        if plan is not None:
            source["files"], version = plan["files"], plan["version"]
        if plan is not None and plan["base"] is not None:
            update = yield from self._open_delta(self.version, plan["base"], closed=True)
        else:
            update = yield from self._open(closed=True)
        if plan is not None:
            update.checksum = plan["checksum"]
        update.source = weight_dir
        update.stamp = yield from self._staged(update, "receive_update", source=source)
        return update, version

    def _open(self, closed: bool = False, lease: float | None = None) -> Generator[Wait, Any, Update]:
        yield lambda: self.update is not None or self._is_settled()
        yield from self._until_closed(take_over=False)
        self.update = update = Update(self._new_lease(lease), closed=closed)
        is_staged_beside = yield from self._staged(update, "begin_update", have_weights=self.loaded)
        yield from self._prepared(update)
        if not is_staged_beside:
            yield STEP_BOUNDARY
            self._check_open(update)
            self._memory.fire("overwrite")
            self._executor.call("release", {"tags": ["weights"]})
        return update

    @command("update_weights")
    def update_weights(self, update: dict[str, Any], update_id: str | None = None) -> Command:
        """Stage the tensors that `update` announces (names, dtypes, shapes, and where they are).  `update_id`, here and
        in other commands: Conflict if another update is open."""
        opened = self._filling(update_id=update_id)
        opened.source = update.get("weight_dir", update.get("path"))
        opened.way = "disk" if opened.source is not None else "ipc" if "segment" in update else "process group"
        if RANDOM_SEED in update:
            opened.way = "a seed"
        opened.stamp = yield from self._staged(opened, "receive_update", source=update)
        return {"message": "Weights updated"}

    @command("begin_weight_stream")
    def begin_weight_stream(self, stream: str, update_id: str | None = None) -> Command:
        """What comes under this name belongs to the update that is open now, and to no later one."""
        self._filling(update_id=update_id).streams.add(stream)
        yield from ()
        return {}

    @command("feed_weights")
    def feed_weights(self, stream: str, chunk: bytes, last: bool = False, broken: bool = False) -> Command:
        """Stage a piece of a safetensors file; pieces of one file carry the same `stream`.  `broken`: no more come."""
        opened = self._filling()
        if stream not in opened.streams:
            raise Conflict("the weight update that this body belongs to has ended")
        opened.source, opened.way = None, "http"
        opened.num_bytes += len(chunk)
        yield from self._staged(opened, "feed_update", stream=stream, chunk=chunk, last=last, broken=broken)
        return {"message": "Weights updated"}

    @command("update_weights_from_dir")
    def update_weights_from_dir(
        self, weight_dir: str, weight_version: str | None = None, recompute_kv: bool = False, take_over: bool = False
    ) -> Command:
        """A whole update from a checkpoint directory, or from an adapter's: that is put before the model itself."""
        check_version(weight_version)
        plan = yield from self._planned(weight_dir, weight_version, take_over)
        if plan is not None and plan.get("adapter"):
            return (yield from self._update_adapter(weight_dir, weight_version, recompute_kv))
        update, version = yield from self._open_directory(weight_dir, weight_version, plan)
        update.recompute_kv = recompute_kv
        return (yield from self._commit(update, version))

    def _update_adapter(self, weight_dir: str, weight_version: str | None, recompute_kv: bool) -> Command:
        """Load an adapter under the model's name, and begin an epoch with it."""
        if not self.can_compute:
            raise Conflict("there are no weights that an adapter could change: push full weights", field="weight_dir")

        yield PREPARED  # as an update from a checkpoint has it, when it is opened
        hooks = self._as_model(weight_version, recompute_kv)
        loaded = yield from self._offers["load_adapter"](weight_dir, hooks)
        return {"message": "Weight update finished", "weight_version": self.version, "epoch": self.epoch} | loaded

    def _as_model(self, weight_version: str | None, recompute_kv: bool) -> LoadHooks:
        """Begin an epoch with an adapter that stands before the model."""
        epoch: int | None = None

        def check(is_same: bool) -> None:
            if weight_version == self.version and self.epoch and not is_same:
                reason = f"weight_version: other weights of version {weight_version} serve already"
                raise Conflict(reason, field="weight_version", code="version_in_use")

        def decided(decision: dict[str, Any]) -> None:
            nonlocal epoch
            epoch = decision.get("epoch")

        def placed() -> None:
            self._set_epoch(weight_version, self.origin, epoch)
            self._set_checksum(self.checksum)
            if recompute_kv:
                self.recompute_kv()

        return LoadHooks(check=check, decided=decided, placed=placed)

    @command("finish_weight_update")
    def finish_weight_update(
        self,
        weight_version: str | None = None,
        checksum: str | None = None,
        recompute_kv: bool = False,
        update_id: str | None = None,
    ) -> Command:
        """Commit at a step boundary what was staged; `weight_version`: by default what a delta's file says, or the new
        epoch; `checksum`: what the result of a delta must have; `recompute_kv`: compute the KV of requests in flight
        again with the new weights."""
        check_version(weight_version)
        update = self._filling(weight_version, update_id)
        if update.adapter is not None:
            return (yield from self._commit_adapter(update, update.adapter, weight_version, checksum, recompute_kv))
        if checksum is not None and not update.is_delta:
            raise RequestError("checksum is only for deltas, and this update is not a delta", field="checksum")
        update.recompute_kv = recompute_kv
        return (yield from self._commit(update, weight_version, checksum=checksum))

    def _commit(
        self, update: Update, weight_version: str | None, epoch: int | None = None, checksum: str | None = None
    ) -> Command:
        update.closed = True
        weight_version, result = yield from self._finished(update, weight_version, checksum)
        if weight_version is not None and epoch is None:
            yield from self._check_new(update, weight_version)
        is_reused = self._is_reused(weight_version, result)
        decision = yield from self._prepared(update)
        update.decided, epoch = bool(decision), decision.get("epoch", epoch)
        yield STEP_BOUNDARY
        self._check_open(update)
        if update.spoiled:
            self._fail(update, "a worker call may have changed the weights that the delta changes")
            yield from self._background("abort_update")
            raise Conflict(self.failure or "")
        committed = False
        try:
            self._executor.call("commit_update", {})
            committed = True
        finally:
            if not committed:  # the swap may have happened, so the version of the weights is unknown
                self._memory.fire("tear")
                self._fail(update, "the new weights could not take effect; the engine's log says more")
                yield from self._background("forget_weights")
        self.update = None
        self._memory.fire("commit")
        self.quarantine = self.failure = None
        self.modified_by_rpc = False
        self._set_epoch(weight_version, Origin(update.source, update.stamp, pushed=update.source is None), epoch)
        self._set_checksum(result)
        if update.recompute_kv:
            self.recompute_kv()
        self._log_commit(update, is_reused=is_reused)
        done = {"message": "Weight update finished", "weight_version": self.version, "epoch": self.epoch}
        if result is not None:
            done["checksum"] = result
        if is_reused:
            done["version_reused"] = True
        yield from self._background("forget_weights")
        return done

    def _commit_adapter(
        self, update: Update, name: str, weight_version: str | None, checksum: str | None, recompute_kv: bool
    ) -> Command:
        """Have the pushed adapter take effect, as a load from a directory does."""
        update.closed = True
        is_placed = False
        try:
            done = yield from self._staged(update, "finish_update", checksum=checksum)
            version = weight_version or done["version"]
            hooks = self._as_model(version, recompute_kv) if update.is_model else LoadHooks()

            def decided(decision: dict[str, Any]) -> None:
                self._check_open(update)
                update.decided = bool(decision)
                hooks.decided(decision)

            def placed() -> None:
                nonlocal is_placed
                is_placed, self.update, self.failure = True, None, None
                hooks.placed()
                if recompute_kv and not update.is_model:
                    self.recompute_kv()

            watch = LoadHooks(hooks.check, decided, lambda: self._check_open(update), placed)
            pushed = PushedSource(update.update_id, version or "", done["checksum"])
            loaded = yield from self._offers["load_pushed_adapter"](name, pushed, watch)
        except RequestError as error:
            if self.update is update:
                self._fail(update, error.message)
            raise
        finally:
            if not is_placed:
                self._executor.background("drop_adapter", {"key": update.update_id})
        return {"message": "Weight update finished", "weight_version": self.version, "epoch": self.epoch} | loaded

    def _prepared(self, update: Update) -> Generator[Wait, Any, dict[str, Any]]:
        """Until the other engines are as far with this update, if there are others; what was decided.  If one of them
        has refused it, it is rolled back here too."""
        try:
            decision: dict[str, Any] = yield PREPARED
        except Conflict as error:
            if self.update is update:
                self._fail(update, error.message)
                yield from self._background("abort_update")
            raise
        self._check_open(update)
        return decision

    def _is_reused(self, weight_version: str | None, checksum: str | None) -> bool:
        """Whether other weights than those that serve have had the version, and may differ from these."""
        earlier = weight_version is not None and weight_version != self.version
        return earlier and self._history.is_reused(weight_version or "", checksum)

    def _log_commit(self, update: Update, *, is_reused: bool) -> None:
        if is_reused:
            logger.warning("version %s is the name of earlier weights, too: only the epochs differ", self.version)
        logger.info(
            "weights of version %s committed as epoch %d, %.1f s after the update was opened: a %s of %.1f MB by %s%s",
            self.version,
            self.epoch,
            update.lease.age,
            "delta" if update.is_delta else "full set",
            update.num_bytes / 1e6,
            update.way,
            "; KV is computed again" if update.recompute_kv else "",
        )

    def _finished(
        self, update: Update, weight_version: str | None, checksum: str | None
    ) -> Generator[Wait, Any, tuple[str | None, str | None]]:
        """Complete what is staged: the version, and the checksum of the result if it is known."""
        if not update.is_delta:
            staged = yield from self._staged(update, "finish_update")
            update.num_bytes = update.num_bytes or (staged or {}).get("num_bytes", 0)
            return weight_version, None
        done = yield from self._staged(update, "finish_update", checksum=checksum or update.checksum)
        version, result = done["version"], done["checksum"]
        update.num_bytes = update.num_bytes or done["num_bytes"]
        if weight_version is None:
            weight_version = version
        reason = ""
        if version is not None and weight_version != version:
            reason = f"the delta makes version {version}, not {weight_version}"
        if reason:
            self._fail(update, reason)
            yield from self._background("abort_update")
            raise Conflict(f"weight_version: {reason}", field="weight_version", code="version_in_use")
        return weight_version, result

    def note_worker_call(self) -> None:
        super().note_worker_call()
        if self.update is not None:
            self.update.spoiled = self.update.is_delta

    @command("abort_weight_update")
    def abort_weight_update(self, update_id: str | None = None) -> Command:
        """Roll back: drop what was staged, and what is still coming."""
        update = self._opened(update_id=update_id)
        if update.decided:
            yield self._has_ended(update)
            raise Conflict("no weight update is open: it was being committed", code="no_update")
        self._fail(update, "the weight update was aborted")
        self._executor.interrupt()
        yield from self._background("abort_update")
        return {"message": "Weight update aborted"}

    @command("update_weight_version")
    def update_weight_version(self, new_version: str) -> Command:
        """Name the weights that serve, and begin a new epoch, as a worker call may have changed them.  After a failover
        this confirms that the loaded weights are the right ones."""
        check_version(new_version, "new_version")
        if self.update is not None:
            raise Conflict("a weight update is open: finish or abort it first")
        decision = yield PREPARED
        yield STEP_BOUNDARY
        origin = Origin(pushed=True) if self.modified_by_rpc else self.origin
        self._set_epoch(new_version, origin, decision.get("epoch"))
        self._set_checksum(self.checksum)
        self._memory.fire("confirm")
        if self._memory.state == "loaded":
            self.quarantine = None
        return {"success": True, "new_version": new_version, "epoch": self.epoch}

    def _check_new(self, update: Update, weight_version: str) -> Generator[Wait, Any, None]:
        """Refuse the version that serves for other weights: one name would stand for two.  The same weights may come
        again, from a client that has not heard of its success, and the first update may have the name of the start."""
        comparable = self.can_compute and not self.modified_by_rpc
        if weight_version != self.version or not self.epoch or not comparable:
            return
        is_same = yield from self._staged(update, "is_same_update")
        if not is_same:
            reason = f"other weights of version {weight_version} serve already"
            self._fail(update, reason)
            yield from self._background("abort_update")
            raise Conflict(f"weight_version: {reason}", field="weight_version", code="version_in_use")

    def _opened(self, weight_version: str | None = None, update_id: str | None = None) -> Update:
        """`weight_version`: what it is to make; `update_id`: what it must be."""
        if self.update is None:
            last = f"; the last one failed: {self.failure}" if self.failure else ""
            if weight_version is not None and weight_version == self.version:
                last = f"; weights of version {weight_version} serve already"
            raise Conflict(f"no weight update is open: start one first{last}", code="no_update")
        if update_id is not None and update_id != self.update.update_id:
            raise Conflict(
                f"the weight update {update_id} is over, and another one is open: {self.failure or 'it was committed'}",
                field="update_id",
            )
        return self.update

    def _filling(self, weight_version: str | None = None, update_id: str | None = None) -> Update:
        """The open update.  Raises Conflict if nothing more may come; the update is not affected by that."""
        opened = self._opened(weight_version, update_id)
        if opened.closed:
            raise Conflict("the weight update is closed: it is being committed, or comes from a directory as a whole")
        opened.lease.extend()
        return opened

    def _check_open(self, update: Update) -> None:
        if self.update is not update:
            raise Conflict(self.failure or "the weight update was aborted")

    def _staged(self, update: Update, method: str, **args: Any) -> Generator[Wait, Any, Any]:
        """A background call for an update; if it fails, the update is rolled back and the error is raised."""
        future = self._executor.background(method, args)
        with update.lease.used():
            yield future
        self._check_open(update)
        error = future.exception()
        if error is not None:
            known = isinstance(error, RequestError)
            self._fail(update, str(error) if known else f"{type(error).__name__} in the engine; its log says more")
            yield from self._background("abort_update")
        return future.result()

    def _fail(self, update: Update, reason: str) -> None:
        """The update is over.  If the old weights are gone, nothing can be served until another one succeeds."""
        self.update = None
        self.failure = reason
        logger.warning("the weight update opened %.1f s ago was rolled back: %s", update.lease.age, reason)
        before = self._memory.state
        self._memory.fire("roll back")
        if before in ("overwriting", "torn") or (before == "broken" and self.quarantine is None):
            self.quarantine = f"a weight update failed when the old weights were gone already: {reason}"
            self._requests.end_all("abort_quarantine")

    def _set_checksum(self, checksum: str | None) -> None:
        """What the weights that serve have; None: it is not known."""
        self.checksum = checksum
        self._history.add(self.version, checksum)

    # --- commands that look at the weights ---

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
