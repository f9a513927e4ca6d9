"""The admin commands as methods: pausing, weights, adapters, sleep, worker calls.

`admin` declares the commands, and the engine implements them (docs/rl.md).  Nothing here keeps state between two calls
but `AdapterLoads`.  Names are those of vLLM's AsyncLLM.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import cached_property
from typing import Any

from tokserve.base.errors import Conflict, EngineDead, RequestError
from tokserve.base.rooms import part
from tokserve.protocol.adapter_choice import LoRARequest
from tokserve.protocol.commands import UpdateFromDirectory
from tokserve.protocol.messages import Status
from tokserve.protocol.prompt import pack_ids


def _part(request: Any, name: str) -> Any:
    """A field of a request, which may be a mapping or (as in vLLM) an object; None if it is absent."""
    return request.get(name) if isinstance(request, Mapping) else vars(request).get(name)


class AdminMethods(ABC):
    """Methods of a client that can call the engine."""

    _pauses = 0  # blocks of `paused`

    @property
    @abstractmethod
    def status(self) -> Status:
        """The engine's state, as last reported."""

    @property
    def num_engines(self) -> int:
        """Engines that hold the model, each a rank of a weight transfer."""
        return 1

    @abstractmethod
    async def call(self, method: str, /, **args: Any) -> Any:
        """Call a command of the engine by name."""

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
        lease: float | None = None,
        take_over: bool = False,
    ) -> None:
        """Stop generating; returns when generation has stopped.  mode: abort, wait, keep or retract; new requests wait.

        `lease`: seconds without `extend_pause` after which generation goes on; default: none.  `take_over`: a longer
        lease of another pause does not count.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        await self.call("pause", mode=mode, clear_cache=clear_cache, lease=lease, take_over=take_over)

    async def extend_pause(self) -> None:
        """Extend the lease of the pause.  Raises Conflict if generation is not paused any more."""
        await self.call("extend_pause")

    async def resume_generation(self) -> None:
        """Go on after a pause."""
        await self.call("resume")

    @asynccontextmanager
    async def paused(self, mode: str = "keep") -> AsyncIterator[None]:
        """Pause for the length of the block; resumes even if it raises or is cancelled, also while it is pausing.  Of
        several blocks, nested or at once, the last one that ends resumes."""
        self._pauses += 1
        try:
            await self.pause_generation(mode=mode, clear_cache=False)
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                await self.resume_generation()

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return (await self.fresh_status()).paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory: level 0 none, 1 the KV cache's, 2 the weights' as well; returns when it is free."""
        await self.call("sleep", level=level, mode=mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`, or the parts in `tags`: weights, kv_cache, scheduling."""
        await self.call("wake_up", tags=None if tags is None else list(tags))

    async def is_sleeping(self) -> bool:
        """Whether any part is asleep."""
        return (await self.fresh_status()).sleeping

    async def release_kv_cache_memory(self) -> None:
        """Release the KV cache's memory until `wake_up(["kv_cache"])`."""
        await self.call("release_kv_cache_memory")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False, *, reset_external: bool = False
    ) -> bool:
        """Empty the prefix cache; not needed after a weight update.  `reset_external`: drop the earlier outputs that
        are kept as drafts as well.  Running requests keep their KV pages, so the other arguments (vLLM's) are
        ignored."""
        return bool(await self.call("reset_prefix_cache", reset_external=reset_external))

    async def add_draft_corpus(
        self, group: str, token_ids: Sequence[Sequence[int] | bytes], *, lora_name: str = "", cache_salt: str = ""
    ) -> Any:
        """Keep outputs, as ids or packed int32, as drafts for requests with this `draft_group`; {"outputs": how many
        the group has}."""
        packed = [ids if isinstance(ids, bytes) else pack_ids(ids) for ids in token_ids]
        args = {"draft_group": group, "token_ids": packed, "lora_name": lora_name, "cache_salt": cache_salt}
        return await self.call("add_draft_corpus", **args)

    async def remove_draft_corpus(self, group: str) -> Any:
        """Drop the outputs of a group; {"removed": how many those were}."""
        return await self.call("remove_draft_corpus", draft_group=group)

    async def init_weight_transfer_engine(self, request: Any, *, take_over: bool = False) -> Any:
        """`request`: {"init_info": {...}} or an object with that attribute.  `take_over`: roll back an open update."""
        options = _part(request, "init_info") or {}
        return await self.call("init_weight_transfer_engine", init_info=options, take_over=take_over)

    async def shutdown_weight_transfer_engine(self) -> None:
        """Close the transfer backend; an open update is rolled back."""
        await self.call("shutdown_weight_transfer_engine")

    async def start_weight_update(
        self,
        is_checkpoint_format: bool = True,
        base_version: str | None = None,
        base_checksum: str | None = None,
        *,
        lora_name: str | None = None,
        lora_config: dict[str, Any] | None = None,
        lease: float | None = None,
        take_over: bool = False,
    ) -> dict[str, Any]:
        """Open an update; with a base, of a delta.  Raises Conflict if one is open, or if others than the base serve.

        `lora_config`: of an adapter with this adapter_config.json; `lora_name`: its name, default: the model's own.

        `lease`: seconds without a call of the update after which it is rolled back; default: `--control-lease`.
        `take_over`: roll back an update that is open.  Returns {"update_id"}, which other calls may name: they are
        refused (Conflict) where another update is open.
        """
        return await self.call(
            "start_weight_update",
            is_checkpoint_format=is_checkpoint_format,
            base_version=base_version,
            base_checksum=base_checksum,
            lora_name=lora_name,
            lora_config=lora_config,
            lease=lease,
            take_over=take_over,
        )

    async def update_weights(self, request: Any) -> None:
        """Stage the tensors of {"update_info": {...}} (or an object with that attribute, or a list with one per rank).

        {"weight_dir": PATH} outside an update is a complete one, with `weight_version`, `recompute_kv` and `take_over`
        if given.  So are tensors: a module, a state_dict, or pairs of (name, tensor); within an update they are staged.
        Raises TypeError for anything else.
        """
        if isinstance(request, Mapping) and "weight_dir" in request and request.get("update_info") is None:
            names = UpdateFromDirectory.__struct_fields__
            arguments = {name: request[name] for name in names if request.get(name) is not None}
            await self.call("update_weights_from_dir", **arguments)
            return
        is_request = "update_info" in request if isinstance(request, Mapping) else hasattr(request, "update_info")
        if not is_request:
            await self._update_by_tensors(request)
            return
        update = _part(request, "update_info")
        if isinstance(update, list) and self.num_engines == 1:
            update = update[0] if update else None
        if not isinstance(update, Mapping | list):
            raise RequestError("update_info must be an object", field="update_info")
        staged = update if isinstance(update, list) else dict(update)
        await self.call("update_weights", update=staged, update_id=_part(request, "update_id"))

    async def load_weights(
        self, directory: str, version: str | None = None, *, recompute_kv: bool = False
    ) -> dict[str, Any]:
        """A complete update from a checkpoint directory, or from the files of a version that `push` wrote there
        (default: the newest): {"weight_version", "epoch"}."""
        await self.call(
            "update_weights_from_dir", weight_dir=str(directory), weight_version=version, recompute_kv=recompute_kv
        )
        return {"weight_version": self.status.weight_version, "epoch": self.status.epoch}

    async def served_weights(self, *, checksum: bool = False, tensors: bool = False) -> dict[str, Any]:
        """Which weights serve: {"weight_version", "epoch", "checksum", "last_failure", "adapters"}.  `checksum`: have
        it computed; `tensors`: list the tensors in which deltas count."""
        listed = await self.call("weight_coordinates") | {"delta_format": "tokserve-delta-1"} if tensors else {}
        if checksum:
            await self.call("weights_checksum")
        status = await self.fresh_status()
        known = {"weight_version": status.weight_version, "epoch": status.epoch, "checksum": status.checksum}
        adapters = [
            {
                "lora_name": adapter.name,
                "lora_path": adapter.path or None,
                "generation": adapter.generation,
                "lora_version": adapter.version or None,
                "checksum": adapter.checksum or None,
            }
            for adapter in status.adapters
        ]
        return known | {"last_failure": status.failure, "adapters": adapters} | listed

    async def _update_by_tensors(self, weights: Any) -> None:
        """Push tensors of this process, in the update that is open, else as a complete one."""
        files = part("weights", "files")(weights)  # loads torch, as its caller has
        with closing(files):
            await self._update_by_files(next(files), files)

    async def _update_by_files(self, first: Iterable[bytes], others: Iterable[Iterable[bytes]]) -> None:
        stream = secrets.token_hex(8)
        update_id = None
        try:
            await self.begin_weight_stream(stream)
        except Conflict:  # none is open, or it is closed, and then none can be opened
            update_id = (await self.start_weight_update())["update_id"]
        done = False
        try:
            if update_id is not None:
                await self.begin_weight_stream(stream, update_id)
            await self._feed_file(stream, first)
            for pieces in others:
                stream = secrets.token_hex(8)
                await self.begin_weight_stream(stream, update_id)
                await self._feed_file(stream, pieces)
            if update_id is not None:
                await self.finish_weight_update(update_id=update_id)
            done = True
        finally:
            if not done:
                with suppress(RequestError, EngineDead):  # it was rolled back already
                    await self.abort_weight_update(update_id)

    async def _feed_file(self, stream: str, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            await self.feed_weights(stream, piece)
        await self.feed_weights(stream, b"", last=True)

    async def begin_weight_stream(self, stream: str, update_id: str | None = None) -> None:
        """Announce a safetensors file, for `feed_weights`, in the update that is open now.  Raises Conflict."""
        await self.call("begin_weight_stream", stream=stream, update_id=update_id)

    async def feed_weights(self, stream: str, chunk: bytes, *, last: bool = False, broken: bool = False) -> None:
        """Stage a piece of the safetensors file announced as `stream`; `broken`: the rest will not come."""
        await self.call("feed_weights", stream=stream, chunk=chunk, last=last, broken=broken)

    async def finish_weight_update(
        self,
        weight_version: str | None = None,
        checksum: str | None = None,
        *,
        recompute_kv: bool = False,
        update_id: str | None = None,
    ) -> dict[str, Any]:
        """Commit: {"weight_version", "epoch", "message"}.  Raises RequestError if tensors are missing.  `checksum`:
        what the result of a delta must have.  `recompute_kv`: requests in flight go on with KV of the new weights."""
        return await self.call(
            "finish_weight_update",
            weight_version=weight_version,
            checksum=checksum,
            recompute_kv=recompute_kv,
            update_id=update_id,
        )

    async def abort_weight_update(self, update_id: str | None = None) -> None:
        """Roll the open update back; with `update_id`, no other than that."""
        await self.call("abort_weight_update", update_id=update_id)

    async def update_weight_version(self, new_version: str) -> None:
        """Rename the version of the weights that serve; begins a new epoch."""
        await self.call("update_weight_version", new_version=new_version)

    async def get_weight_version(self) -> str:
        return (await self.fresh_status()).weight_version

    async def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of the weights as stored in memory, by parameter."""
        return await self.call("weight_checksums")

    async def checkpoint_checksums(self) -> dict[str, dict[str, str]]:
        """SHA-256 of the tensors that the weights were loaded from: {"checkpoint": by name, "tied": aliases}.  Raises
        Conflict if they are not available."""
        return await self.call("checkpoint_checksums")

    async def load_lora_adapter(
        self, lora_name: str, lora_path: str, load_inplace: bool | None = None
    ) -> dict[str, Any]:
        """Load a PEFT directory under a name, replacing what has it: {"lora_name", "lora_path", "generation"}."""
        return await self.call(
            "load_lora_adapter", lora_name=lora_name, lora_path=str(lora_path), load_inplace=load_inplace
        )

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter; returns when its last request has ended.  Raises NotFound."""
        await self.call("unload_lora_adapter", lora_name=lora_name)

    @cached_property
    def adapter_loads(self) -> Any:
        """What `add_lora` has loaded, a `features.lora.lora_requests.AdapterLoads`.  Raises StartError without it."""
        return part("lora", "loads")(self.load_lora_adapter, self.fresh_status)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter unless it is loaded, with this number, from these files; returns whether it was loaded."""
        loaded: bool = await self.adapter_loads.ensure(lora_request)
        return loaded

    async def list_loras(self) -> dict[str, str]:
        """The loaded adapters: name to path."""
        return {adapter.name: adapter.path for adapter in (await self.fresh_status()).adapters}

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, bool] | None = None,
        max_seconds: float = 60.0,
        op_by_op: bool = False,
    ) -> dict[str, Any]:
        """Record where the engine's time goes, until `stop_profile` or for so many steps or seconds; needs
        `profiler_dir`.  Raises Conflict while a profile is under way."""
        args = {} if profiler_kwargs is None else {"profiler_kwargs": dict(profiler_kwargs)}
        return await self.call(
            "start_profile",
            profile_prefix=profile_prefix,
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
            max_seconds=max_seconds,
            op_by_op=op_by_op,
            **args,
        )

    async def stop_profile(self) -> dict[str, Any]:
        """The trace's path, and tables of where time went (docs/profiling.md); also of a profile that has ended by
        itself.  Raises Conflict if there is none."""
        return await self.call("stop_profile")

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker extension between two steps: a result per worker.  Arguments and results must be
        plain values."""
        async with asyncio.timeout(timeout):
            return await self.call("collective_rpc", method=method, args=list(args), kwargs=dict(kwargs or {}))

    async def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call an importable function with the model, in the engine's process: a result per worker."""
        if "<" in func.__qualname__ or func.__module__ == "__main__":
            raise RequestError("func must be a function of a module that the engine can import", field="func")
        return await self.call("apply_model", function=f"{func.__module__}:{func.__qualname__}")

    async def fresh_status(self) -> Status:
        """The engine's state as of now."""
        await self.call("ping")
        return self.status
