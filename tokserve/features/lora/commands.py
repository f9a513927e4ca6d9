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
from typing import Any

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
    return feature


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

    def may_enter(self, request: Request) -> bool:
        adapter = request.variant
        return not isinstance(adapter, Adapter) or adapter.is_ready

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
            LoadedAdapter(adapter.name, adapter.path, adapter.generation, adapter.digest, adapter.anywhere)
            for _, adapter in sorted(self._by_name.items())
        ]

    def take_over(self, was: Status) -> None:
        """Failover: have the adapters of the engine before, and go on with its number of loads.  They are read when
        requests name them, unless they were loaded at the start."""
        for adapter in self.listed():
            if adapter not in was.adapters:
                self.slots.release(self._by_name.pop(adapter.name))
        for name, path, generation, digest, anywhere in map(msgspec.structs.astuple, was.adapters):
            if name not in self._by_name:
                self._by_name[name] = Adapter(name, path, -1, generation, digest=digest, anywhere=anywhere)
                if not os.path.isdir(path):
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

    def load_as_model(
        self, path: str, check: Callable[[bool], None], placed: Callable[[dict[str, Any]], None]
    ) -> Generator[Wait, Any, dict[str, Any]]:
        """Load a PEFT directory under the model's own name, so that requests for the model are for the adapter.
        `check`: is told whether the weights are the same as before, and raises if they may not come; `placed`: is told
        what was decided, at the step boundary from which on they serve."""
        return (yield from self._load(self._model_name, path, None, check=check, placed=placed))

    def _load(
        self,
        name: str,
        path: str,
        load_inplace: bool | None,
        *,
        anywhere: bool = False,
        check: Callable[[bool], None] = lambda is_same: None,
        placed: Callable[[dict[str, Any]], None] = lambda decision: None,
    ) -> Generator[Wait, Any, dict[str, Any]]:
        """`anywhere`: the operator says where from, so `allowed_weight_dirs` means nothing."""
        yield lambda: not self.slots.reading  # one after the other
        self.slots.reading = True
        try:
            self._check_name(name, load_inplace)
            read = self._executor.background("read_adapter", {"lora_path": path, "anywhere": anywhere})
            yield read
            digest = read.result() or ""
            before = self._by_name.get(name)
            check(bool(digest) and before is not None and before.digest == digest)
            decision = yield from self._prepared(name)
            adapter = self._by_name.get(name)
            if adapter is None:
                adapter = self._by_name[name] = Adapter(name, path, -1, 0)
            evicted = self.slots.place(adapter, evict=not anywhere)
            self._replace(adapter, path, digest, anywhere)
            placed(decision)
        finally:
            self.slots.reading = False
        logger.info("adapter %s is loaded from %s, generation %d", name, path, adapter.generation)
        loaded = {"lora_name": name, "lora_path": path, "generation": adapter.generation}
        if evicted is None:
            return loaded
        logger.info("adapter %s has no slot any more: it was unused for longest", evicted.name)
        return loaded | {"evicted": evicted.name}

    def _prepared(self, name: str) -> Generator[Wait, Any, dict[str, Any]]:
        """Until the other engines are as far, if there are others, and no step is in flight; what was decided."""
        yield STEP_BOUNDARY
        self._placing = name
        try:
            decision: dict[str, Any] = (yield PREPARED) or {}
            yield STEP_BOUNDARY
        finally:
            self._placing = None
        return decision

    def _replace(self, adapter: Adapter, path: str, digest: str, anywhere: bool) -> None:
        """The name stands for other weights from here on."""
        self.num_loads += 1
        is_new = not adapter.generation
        adapter.path, adapter.generation, adapter.anywhere = path, self.num_loads, anywhere
        adapter.digest = digest
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
        logger.info("adapter %s is unloaded", lora_name)
        return {"lora_name": lora_name}

    def _check(self, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME or not NAME.fullmatch(name):
            raise RequestError(f"lora_name must have 1 to {MAX_NAME} printable characters", field="lora_name")
