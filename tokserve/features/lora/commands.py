"""Which LoRA adapters requests may name, and the commands that load and unload them while requests run.

The one authority on adapters for all front ends.  A load reads in the background thread and takes effect between two
steps; an unload lets the adapter's requests end first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future
from typing import Any

import msgspec

from tokserve.base.errors import Conflict, NotFound, RequestError, StartError
from tokserve.config import LoraConfig
from tokserve.engine.admin.command import PREPARED, STEP_BOUNDARY, Command, RunningRequests, Wait, command
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.scheduler import Scheduler
from tokserve.executor.base import Executor
from tokserve.features.lora.adapter import Adapter
from tokserve.features.lora.slot_assignment import AdapterSlots
from tokserve.protocol.messages import LoadedAdapter

logger = logging.getLogger(__name__)

MAX_NAME = 256
NAME = re.compile(r"[^\x00-\x1f\x7f]+")


class Adapters:
    """The table of adapters by name; those of the configuration are loaded at once.  Raises StartError.  `model_name`:
    the name that an adapter has whose directory comes as a weight update: it stands before the model itself.

    A name stays until it is unloaded; which adapters are on the device at a time is up to `slots`."""

    def __init__(
        self,
        config: LoraConfig,
        requests: RunningRequests,
        scheduler: Scheduler,
        cache: PrefixCache,
        executor: Executor,
        model_name: str,
    ) -> None:
        self._config = config
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self._model_name = model_name
        self._by_name: dict[str, Adapter] = {}
        self.slots = AdapterSlots(config.max_loras, requests, executor, evicts=config.lora_eviction == "lru")
        self._placing: str | None = None  # the name of an adapter that waits for other engines
        self.num_loads = 0
        self._load_at_start()

    def get(self, name: str) -> Adapter | None:
        """The adapter that a request names."""
        adapter = self._by_name.get(name)
        if adapter is not None:
            self.slots.use(adapter)
        return adapter

    def listed(self) -> list[LoadedAdapter]:
        """All adapters that requests may name."""
        return [
            LoadedAdapter(adapter.name, adapter.path, adapter.generation, adapter.digest)
            for _, adapter in sorted(self._by_name.items())
        ]

    def take_over(self, listed: Collection[LoadedAdapter], num_loads: int) -> None:
        """Failover: have the adapters of the engine before, which are read when a request names them unless they were
        loaded at the start, and go on with its number of loads.  There must be no requests."""
        for adapter in self.listed():
            if adapter not in listed:
                self.slots.release(self._by_name.pop(adapter.name))
        for name, path, generation, digest in map(msgspec.structs.astuple, listed):
            if name not in self._by_name:
                anywhere = (name, path) in self._config.modules()
                self._by_name[name] = Adapter(name, path, -1, generation, digest=digest, anywhere=anywhere)
        self.num_loads = max(self.num_loads, num_loads)

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
        self._check_enabled()
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
            self._cache.on_adapter_replaced(adapter)
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
        self._check_enabled()
        yield lambda: self._placing != lora_name
        adapter = self._by_name.pop(lora_name, None)
        if adapter is None:
            raise NotFound(f"no adapter {lora_name[:MAX_NAME]!r} is loaded", field="lora_name", code="model_not_found")
        yield lambda: all(request.adapter is not adapter for request in self._requests.live)
        yield STEP_BOUNDARY
        self.slots.release(adapter)
        logger.info("adapter %s is unloaded", lora_name)
        return {"lora_name": lora_name}

    def _check(self, name: str) -> None:
        self._check_enabled()
        if not 0 < len(name) <= MAX_NAME or not NAME.fullmatch(name):
            raise RequestError(f"lora_name must have 1 to {MAX_NAME} printable characters", field="lora_name")

    def _check_enabled(self) -> None:
        if not self._config.enable_lora:
            raise RequestError("this server serves no adapters: start it with --enable-lora", field="lora_name")
