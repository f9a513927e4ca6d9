"""`LLM`'s control methods: `AsyncLLM`'s of these names, blocking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tokserve.client.admin import AdminMethods
from tokserve.client.async_llm import AsyncLLM

T = TypeVar("T")
P = ParamSpec("P")
Method = Callable[Concatenate["BlockingControl", P], T]


def _blocking(command: Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]]) -> Method[P, T]:
    """An admin command as a method of `LLM`."""

    @wraps(command)
    def call(self: BlockingControl, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(command(self._llm, *args, **kwargs))

    return call


class BlockingControl(ABC):
    """Pausing, weights, adapters, sleep, worker calls."""

    _llm: AsyncLLM

    @abstractmethod
    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work, which the loop's thread does."""

    def call(self, method: str, **args: Any) -> Any:
        """An admin command of the engine by name; `check` raises if the KV accounting is broken."""
        return self._wait(self._llm.call(method, **args))

    pause_generation = _blocking(AdminMethods.pause_generation)
    extend_pause = _blocking(AdminMethods.extend_pause)
    resume_generation = _blocking(AdminMethods.resume_generation)
    is_paused = _blocking(AdminMethods.is_paused)
    sleep = _blocking(AdminMethods.sleep)
    wake_up = _blocking(AdminMethods.wake_up)
    is_sleeping = _blocking(AdminMethods.is_sleeping)
    release_kv_cache_memory = _blocking(AdminMethods.release_kv_cache_memory)
    reset_prefix_cache = _blocking(AdminMethods.reset_prefix_cache)
    add_draft_corpus = _blocking(AdminMethods.add_draft_corpus)
    remove_draft_corpus = _blocking(AdminMethods.remove_draft_corpus)
    init_weight_transfer_engine = _blocking(AdminMethods.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = _blocking(AdminMethods.shutdown_weight_transfer_engine)
    start_weight_update = _blocking(AdminMethods.start_weight_update)
    update_weights = _blocking(AdminMethods.update_weights)
    finish_weight_update = _blocking(AdminMethods.finish_weight_update)
    abort_weight_update = _blocking(AdminMethods.abort_weight_update)
    update_weight_version = _blocking(AdminMethods.update_weight_version)
    get_weight_version = _blocking(AdminMethods.get_weight_version)
    load_lora_adapter = _blocking(AdminMethods.load_lora_adapter)
    unload_lora_adapter = _blocking(AdminMethods.unload_lora_adapter)
    list_loras = _blocking(AdminMethods.list_loras)
    start_profile = _blocking(AdminMethods.start_profile)
    stop_profile = _blocking(AdminMethods.stop_profile)
    collective_rpc = _blocking(AdminMethods.collective_rpc)
    apply_model = _blocking(AdminMethods.apply_model)
    load_weights = _blocking(AdminMethods.load_weights)
    served_weights = _blocking(AdminMethods.served_weights)
    add_lora = _blocking(AdminMethods.add_lora)
    push = _blocking(AsyncLLM.push)

    @contextmanager
    def paused(self, mode: str = "keep") -> Iterator[None]:
        """Pause for the length of the block; resumes even if it raises."""
        pause = self._llm.paused(mode)
        self._wait(pause.__aenter__())
        try:
            yield
        finally:
            self._wait(pause.__aexit__(None, None, None))
