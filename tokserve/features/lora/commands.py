"""Which LoRA adapters requests may name, and the commands that load and unload them while requests run.

The one authority on adapters for all front ends.  A load reads in the background thread and takes effect between two
steps; an unload lets the adapter's requests end first.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tokserve.base.errors import Conflict, NotFound, RequestError, StartError
from tokserve.engine.admin.command import PREPARED, STEP_BOUNDARY, Command, Wait, command
from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.plan_builder import PlanBuilder
from tokserve.engine.request import Request
from tokserve.features.lora.adapter import Adapter
from tokserve.features.lora.slot_assignment import AdapterSlots
from tokserve.protocol.messages import EngineRequest, LoadedAdapter, Status, Submit, SubmitReply

logger = logging.getLogger(__name__)

MAX_NAME = 256
NAME = re.compile(r"[^\x00-\x1f\x7f]+")


def make(context: EngineContext) -> EngineFeature:
    """The adapters of an engine; without `--enable-lora`, what refuses them.  Raises StartError."""
    feature = Adapters(context) if context.config.lora.enable_lora else NoAdapters()
    context.offers["load_adapter"] = feature.load_as_model
    context.offers["begin_adapter"] = feature.begin_push
    context.offers["load_pushed_adapter"] = feature.load_pushed
    return feature


@dataclass(frozen=True, slots=True)
class LoadHooks:
    """What another command that loads an adapter says to it.

    `check`: is told whether the weights are the same as before.  `decided`: is told what was decided, once no other
    engine can refuse any more.  `ready`: it is about to take effect, at a step boundary.  These may raise.  `placed`:
    it has taken effect.
    """

    check: Callable[[bool], None] = lambda is_same: None
    decided: Callable[[dict[str, Any]], None] = lambda decision: None
    ready: Callable[[], None] = lambda: None
    placed: Callable[[], None] = lambda: None


class PushedSource(NamedTuple):
    """The adapter that was pushed under `key`, with the version of the push ("": it has none) and its checksum."""

    key: str
    version: str
    checksum: str


def _not_enabled() -> RequestError:
    return RequestError("this server serves no adapters: start it with --enable-lora", field="lora_name")


def _not_loaded(name: str) -> str:
    return f"no adapter {name[:MAX_NAME]!r} is loaded"


class NoAdapters(EngineFeature):
    """Refuses requests that name an adapter, and the commands."""

    def refuse(self, submit: Submit) -> SubmitReply | None:
        name = next((spec.options.adapter for spec in submit.requests if spec.options.adapter), "")
        return SubmitReply(submit.call_id, "model_not_found", _not_loaded(name)) if name else None

    @command("load_lora_adapter")
    def load(self, **_: Any) -> Any:
        """Refuse the command."""
        raise _not_enabled()

    @command("unload_lora_adapter")
    def unload(self, **_: Any) -> Any:
        """Refuse the command."""
        raise _not_enabled()

    def load_as_model(self, *_: Any) -> Generator[Wait, Any, dict[str, Any]]:
        """Refuse an adapter's directory as a weight update."""
        yield from ()
        raise _not_enabled()

    def begin_push(self, *_: Any) -> tuple[str, dict[str, str]]:
        """Refuse an adapter's tensors."""
        raise _not_enabled()

    load_pushed = load_as_model


class Adapters(EngineFeature):
    """The table of adapters by name; those of the configuration are loaded at once.  Raises StartError.  An adapter
    whose directory comes as a weight update has the model's name: it stands before the model itself.

    A name stays until it is unloaded; which adapters are on the device at a time is up to `slots`."""

    def __init__(self, context: EngineContext) -> None:
        config = context.config
        self._config = config.lora
        self._requests = context.requests
        self._scheduler = context.scheduler
        self._cache = context.cache
        self._executor = context.executor
        self._model_name = (config.server.served_model_name or [config.model.model])[0]
        self._by_name: dict[str, Adapter] = {}
        self.slots = AdapterSlots(
            config.lora.max_loras,
            context.requests,
            context.executor,
            context.outbox,
            evicts=config.lora.lora_eviction == "lru",
        )
        self._placing: str | None = None  # the name of an adapter that waits for other engines
        self.num_loads = 0
        self._load_at_start()

    # --- hooks ---

    def refuse(self, submit: Submit) -> SubmitReply | None:
        for spec in submit.requests:
            if spec.options.adapter and self._named(spec.options.adapter) is None:
                return SubmitReply(submit.call_id, "model_not_found", _not_loaded(spec.options.adapter))
        return None

    def _named(self, name: str) -> Adapter | None:
        """The adapter that a request names."""
        adapter = self._by_name.get(name)
        if adapter is not None:
            self.slots.use(adapter)
        return adapter

    def attach(self, request: Request, spec: EngineRequest) -> None:
        adapter = self._named(spec.options.adapter)
        if adapter is not None:
            request.be_computed_by(adapter)

    def kept_for(self, request: Request) -> str | None:
        adapter = request.variant
        return None if not isinstance(adapter, Adapter) or adapter.is_ready else "adapter"

    def on_slot(self, request: Request, hits: int) -> dict[str, Any]:
        adapter = request.variant
        if not isinstance(adapter, Adapter):
            return {}
        adapter.has_served = True
        return {"adapter": adapter.slot}

    def plan(self, builder: PlanBuilder) -> None:
        """Rows of an adapter are neighbours, as the device reads the adapter of neighbours once."""
        if any([row.request.variant is not None for row in builder.rows]):
            builder.rows.sort(key=lambda row: -1 if row.request.variant is None else row.request.variant.slot)

    def poll(self) -> None:
        self.slots.poll()

    def is_busy(self) -> bool:
        return self.slots.busy

    def status(self) -> dict[str, Any]:
        return {"adapters": self.listed(), "num_loads": self.num_loads}

    def listed(self) -> list[LoadedAdapter]:
        """All adapters that requests may name."""
        return [
            LoadedAdapter(
                adapter.name,
                adapter.path,
                adapter.generation,
                adapter.digest,
                adapter.anywhere,
                adapter.version,
                adapter.checksum,
            )
            for _, adapter in sorted(self._by_name.items())
        ]

    def take_over(self, was: Status) -> None:
        """Failover: have the adapters of the engine before, and go on with its number of loads.  They are read when
        requests name them, unless they were loaded at the start."""
        for adapter in self.listed():
            if adapter not in was.adapters:
                self.slots.release(self._by_name.pop(adapter.name))
        for name, path, generation, digest, anywhere, version, checksum in map(msgspec.structs.astuple, was.adapters):
            if name not in self._by_name:
                self._by_name[name] = Adapter(
                    name, path, -1, generation, digest=digest, version=version, checksum=checksum, anywhere=anywhere
                )
                if not path:
                    logger.warning("the adapter %s was pushed, and its requests fail until it is pushed again", name)
                elif not os.path.isdir(path):
                    logger.warning(
                        "the directory of the adapter %s is not there: %s; its requests fail until it is there again, "
                        "or another is loaded under this name",
                        name,
                        path,
                    )
        self.num_loads = max(self.num_loads, was.num_loads)

    def _load_at_start(self) -> None:
        """Load the configured ones, from wherever they are."""
        for name, path in self._config.modules():
            try:
                self._check(name)
                for wait in self._load(name, path, None, anywhere=True):
                    if isinstance(wait, Future):
                        wait.exception()  # is there: the command goes on
            except RequestError as error:
                raise StartError(f"option lora_modules: {name}: {error.message}") from None

    @command("load_lora_adapter")
    def load(self, lora_name: str, lora_path: str, load_inplace: bool | None = None) -> Command:
        """Load a PEFT directory under a name, in place of what has that name (`load_inplace` False: if none has).

        Requests in flight go on with the new weights, and keep the KV that the old ones made; those that pool, or score
        their prompt, begin again.
        """
        self._check(lora_name)
        if not lora_path:
            raise RequestError("lora_path must not be empty", field="lora_path")
        return (yield from self._load(lora_name, lora_path, load_inplace))

    def load_as_model(self, path: str, hooks: LoadHooks) -> Generator[Wait, Any, dict[str, Any]]:
        """Load a PEFT directory under the model's own name, so that requests for the model are for the adapter."""
        return (yield from self._load(self._model_name, path, None, hooks=hooks))

    def begin_push(self, name: str | None) -> tuple[str, dict[str, str]]:
        """The name of an adapter that is about to be pushed (None: the model's own), and what a delta of it changes.
        Raises RequestError."""
        name = self._model_name if name is None else name
        self._check(name)
        self._check_name(name, None)
        served = self._by_name.get(name)
        return name, {"key": "", "served_version": ""} if served is None else {
            "key": served.key,
            "served_version": served.version,
        }

    def load_pushed(self, name: str, pushed: PushedSource, hooks: LoadHooks) -> Generator[Wait, Any, dict[str, Any]]:
        """Load what was pushed under a name, in place of what has that name."""
        return (yield from self._load(name, "", None, pushed=pushed, hooks=hooks))

    def _load(
        self,
        name: str,
        path: str,
        load_inplace: bool | None,
        *,
        anywhere: bool = False,
        pushed: PushedSource | None = None,
        hooks: LoadHooks = LoadHooks(),
    ) -> Generator[Wait, Any, dict[str, Any]]:
        """`anywhere`: the operator says where from, so `allowed_weight_dirs` means nothing."""
        yield lambda: not self.slots.reading  # one after the other
        self.slots.reading = True
        try:
            self._check_name(name, load_inplace)
            key, version, checksum = pushed or ("", "", "")
            new = Adapter(name, path, -1, 0, key=key, version=version, checksum=checksum, anywhere=anywhere)
            read = self._executor.background("read_adapter", new.source)
            yield read
            new.digest = read.result() or ""
            before = self._by_name.get(name)
            is_same = bool(new.digest) and before is not None and before.digest == new.digest
            hooks.check(is_same)
            if version and before is not None and before.version == version and not is_same:
                raise Conflict(
                    f"weight_version: other weights of version {version} serve already as {name!r}",
                    field="weight_version",
                    code="version_in_use",
                )
            yield from self._prepared(name, hooks)
            adapter = self._by_name.setdefault(name, new)
            evicted = self.slots.place(adapter, evict=not anywhere)
            self._replace(adapter, new)
            hooks.placed()
        finally:
            self.slots.reading = False
        logger.info("adapter %s is loaded from %s, generation %d", name, path or "a push", adapter.generation)
        loaded: dict[str, Any] = {"lora_name": name, "generation": adapter.generation}
        loaded |= {"lora_path": path} if path else {"lora_version": adapter.version or None, "checksum": checksum}
        if evicted is None:
            return loaded
        logger.info("adapter %s has no slot any more: it was unused for longest", evicted.name)
        return loaded | {"evicted": evicted.name}

    def _prepared(self, name: str, hooks: LoadHooks) -> Generator[Wait, Any, None]:
        """Until the other engines are as far, if there are others, and no step is in flight."""
        yield STEP_BOUNDARY
        self._placing = name
        try:
            decision: dict[str, Any] = (yield PREPARED) or {}
            hooks.decided(decision)
            yield STEP_BOUNDARY
            hooks.ready()
        finally:
            self._placing = None

    def _replace(self, adapter: Adapter, new: Adapter) -> None:
        """The name stands for other weights from here on."""
        self.num_loads += 1
        is_new = not adapter.generation
        if adapter.key and adapter.key != new.key:
            self._executor.background("drop_adapter", {"key": adapter.key})
        adapter.path, adapter.generation, adapter.anywhere = new.path, self.num_loads, new.anywhere
        adapter.digest, adapter.key, adapter.checksum = new.digest, new.key, new.checksum
        adapter.version = new.version
        if not is_new:
            self._cache.on_variant_replaced(adapter)
            self._scheduler.restart_prompts(adapter)
        self.slots.touch(adapter)

    def _check_name(self, name: str, load_inplace: bool | None) -> None:
        """Raise Conflict if an adapter cannot be loaded under this name."""
        if name not in self._by_name and self.slots.is_full:
            raise Conflict(
                f"there are {self._config.max_loras} adapters loaded (--max-loras): unload one first", field="lora_name"
            )
        if load_inplace is False and name in self._by_name:
            raise Conflict(f"the adapter {name!r} is loaded already; load_inplace replaces it", field="lora_name")

    @command("unload_lora_adapter")
    def unload(self, lora_name: str) -> Command:
        """Forget an adapter: its name is unknown at once, its slot is free when its last request has ended."""
        yield lambda: self._placing != lora_name
        adapter = self._by_name.pop(lora_name, None)
        if adapter is None:
            raise NotFound(_not_loaded(lora_name), field="lora_name", code="model_not_found")
        yield lambda: all(request.variant is not adapter for request in self._requests.live)
        yield STEP_BOUNDARY
        self.slots.release(adapter)
        if adapter.key:
            self._executor.background("drop_adapter", {"key": adapter.key})
        logger.info("adapter %s is unloaded", lora_name)
        return {"lora_name": lora_name}

    def _check(self, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME or not NAME.fullmatch(name):
            raise RequestError(f"lora_name must have 1 to {MAX_NAME} printable characters", field="lora_name")
