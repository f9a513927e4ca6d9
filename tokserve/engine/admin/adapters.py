"""Which LoRA adapters are loaded, and the commands that load and unload them while requests run.

The one authority on adapters for all front ends.  A load reads in the background thread and takes effect between two
steps; an unload lets the adapter's requests end first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Generator
from concurrent.futures import Future
from typing import Any

from tokserve.config import LoraConfig
from tokserve.engine.adapter import Adapter
from tokserve.engine.admin.command import PREPARED, STEP_BOUNDARY, Command, RunningRequests, Wait, command
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.scheduler import Scheduler
from tokserve.errors import Conflict, NotFound, RequestError, StartError
from tokserve.executor.base import Executor
from tokserve.messages import LoadedAdapter

logger = logging.getLogger(__name__)

MAX_NAME = 256
NAME = re.compile(r"[^\x00-\x1f\x7f]+")


class Adapters:
    """The table of adapters by name; those of the configuration are loaded at once.  Raises StartError.  `taken`: names
    that requests use for something else."""

    def __init__(
        self, config: LoraConfig, requests: RunningRequests, scheduler: Scheduler, cache: PrefixCache,
        executor: Executor, taken: list[str],
    ) -> None:  # fmt: skip
        self._config = config
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self._taken = taken
        self._by_name: dict[str, Adapter] = {}
        self._free = list(range(config.max_loras - 1, -1, -1))  # slots, a stack
        self._loading = False
        self._placing: str | None = None  # the name of an adapter that waits for other engines
        self._uses = 0
        self.num_loads = 0
        self._load_at_start()

    def get(self, name: str) -> Adapter | None:
        adapter = self._by_name.get(name)
        if adapter is not None:
            self._uses += 1
            adapter.last_use = self._uses
        return adapter

    def listed(self) -> list[LoadedAdapter]:
        """All adapters that requests may name."""
        return [
            LoadedAdapter(adapter.name, adapter.path, adapter.generation)
            for _, adapter in sorted(self._by_name.items())
        ]

    def take_over(self, listed: Collection[LoadedAdapter], num_loads: int) -> None:
        """Failover: forget what was loaded at the start unless the engine before had it unchanged, and go on with its
        number of loads.  There must be no requests."""
        for adapter in self.listed():
            if adapter not in listed:
                self._free.append(self._by_name.pop(adapter.name).slot)
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
        yield lambda: not self._loading  # one after the other
        self._loading = True
        try:
            return (yield from self._load(lora_name, lora_path, load_inplace, anywhere=False))
        finally:
            self._loading = False

    def _load(
        self, name: str, path: str, load_inplace: bool | None, *, anywhere: bool
    ) -> Generator[Wait, Any, dict[str, Any]]:
        """`anywhere`: the operator says where from, so `allowed_weight_dirs` means nothing."""
        self._check_room(name, evict=not anywhere)
        if load_inplace is False and name in self._by_name:
            raise Conflict(f"the adapter {name!r} is loaded already; load_inplace replaces it", field="lora_name")
        read = self._executor.background("read_adapter", {"lora_path": path, "anywhere": anywhere})
        yield read
        digest = read.result() or ""
        yield STEP_BOUNDARY
        evicted = self._check_room(name, evict=not anywhere)
        if evicted is not None:
            self._free.append(self._by_name.pop(evicted.name).slot)
        self._placing = name
        try:
            yield PREPARED
            yield STEP_BOUNDARY
        except Conflict:
            if evicted is not None:
                self._free.remove(evicted.slot)
                self._by_name[evicted.name] = evicted
            raise
        finally:
            self._placing = None
        if evicted is not None:
            logger.info("adapter %s is evicted: it was unused for longest", evicted.name)
        adapter = self._by_name.get(name)
        slot = self._free[-1] if adapter is None else adapter.slot
        self._executor.call("place_adapter", {"slot": slot})
        self.num_loads += 1
        if adapter is None:
            self._free.pop()
            adapter = self._by_name[name] = Adapter(name, path, slot, self.num_loads)
        else:
            adapter.path, adapter.generation = path, self.num_loads
            self._cache.on_adapter_replaced(adapter)
            self._scheduler.restart_prompts(adapter)
        adapter.digest = digest
        self._uses += 1
        adapter.last_use = self._uses
        logger.info("adapter %s is loaded from %s, generation %d", name, path, adapter.generation)
        loaded = {"lora_name": name, "lora_path": path, "generation": adapter.generation}
        return loaded if evicted is None else loaded | {"evicted": evicted.name}

    def _check_room(self, name: str, *, evict: bool) -> Adapter | None:
        """Raise Conflict if an adapter of this name cannot have a slot; returns the one that must be evicted first."""
        if name in self._by_name or self._free:
            return None
        loaded = f"there are {self._config.max_loras} adapters loaded (--max-loras)"
        if self._config.lora_eviction == "none" or not evict:
            raise Conflict(f"{loaded}: unload one first", field="lora_name")
        used = {request.adapter for request in self._requests.live}
        unused = [adapter for adapter in self._by_name.values() if adapter not in used]
        if not unused:
            raise Conflict(f"{loaded}, and requests use all of them", field="lora_name")
        return min(unused, key=lambda adapter: adapter.last_use)

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
        self._free.append(adapter.slot)
        logger.info("adapter %s is unloaded", lora_name)
        return {"lora_name": lora_name}

    def _check(self, name: str) -> None:
        self._check_enabled()
        if not 0 < len(name) <= MAX_NAME or not NAME.fullmatch(name):
            raise RequestError(f"lora_name must have 1 to {MAX_NAME} printable characters", field="lora_name")
        if name in self._taken:
            raise Conflict(f"{name!r} is a name of the model itself", field="lora_name")

    def _check_enabled(self) -> None:
        if not self._config.enable_lora:
            raise RequestError("this server serves no adapters: start it with --enable-lora", field="lora_name")
