"""POST /collective_rpc: methods of vLLM's workers, and of SkyRL's, which are commands of the engine here.

A worker extension of the operator's goes before all of them.  Methods that receive CUDA memory by RDMA, or unpickle
what they get, are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import EngineDead, RequestError, invalid
from tokserve.protocol.commands import LONGEST_RPC
from tokserve.server.admin import commands
from tokserve.server.http import body
from tokserve.server.serving import Serving

K = TypeVar("K", bound=msgspec.Struct)
WAYS = (
    "use a process group (/init_weight_transfer_engine, and /update_weights with update_info), CUDA IPC handles as "
    "JSON in update_info, a checkpoint directory, or a safetensors file as the body of /update_weights (docs/rl.md)"
)
REFUSED = {
    "update_weights_ipc": "receives CUDA IPC handles in a pickle",
    "init_weight_transfer_engine_rdt": "receives CUDA memory by RDMA",
    "update_weights_rdt": "receives CUDA memory by RDMA",
    "init_weight_update_communicator": "unpickles what it gets, which can run any code",
    "load_weights": "unpickles what it gets, which can run any code",
}


class ReloadWeights(msgspec.Struct, forbid_unknown_fields=True):
    """A whole update from a directory; None: from the one that the server was started with."""

    weights_path: str | None = None
    is_checkpoint_format: bool = True


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """The tensors of an update that is open."""

    update_info: dict[str, Any]
    update_id: str | None = None


class PullWeights(msgspec.Struct, forbid_unknown_fields=True):
    """A whole update from a directory of versions; `local_dir` is where vime keeps its copy, which is not needed."""

    source_dir: str
    target_version: str | int | None = None
    local_dir: str | None = None
    local_checkpoint_dir: str | None = None
    pre_read_hook: str | None = None


class StartSync(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors have the checkpoint's names, whatever is said."""

    is_checkpoint_format: bool = True


class SleepForSync(msgspec.Struct, forbid_unknown_fields=True):
    """Requests stay, and are computed anew after the end; so KV is not kept, whatever `offload_kv` says."""

    offload_kv: bool = False


class WakeForSync(msgspec.Struct, forbid_unknown_fields=True):
    """What to wake: weights, kv_cache, scheduling; all by default."""

    tags: list[str] | None = None


class NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    """The method has none."""


async def _reload_weights(serving: Serving, args: ReloadWeights) -> None:
    await serving.llm.load_weights(args.weights_path or serving.config.model.model)


async def _update_weights(serving: Serving, args: UpdateWeights) -> None:
    await serving.llm.update_weights({"update_info": args.update_info, "update_id": args.update_id})


async def _pull_weights(serving: Serving, args: PullWeights) -> None:
    if args.pre_read_hook is not None:
        raise RequestError(
            "pre_read_hook names code to run; the files must be there before the call", field="kwargs.pre_read_hook"
        )
    version = None if args.target_version is None else str(args.target_version)
    await serving.llm.load_weights(args.source_dir, version)


async def _start(serving: Serving, args: StartSync) -> None:
    await serving.llm.start_weight_update()


async def _finish(serving: Serving, args: NoArguments) -> None:
    await serving.llm.finish_weight_update()


async def _sleep(serving: Serving, args: SleepForSync) -> None:
    await serving.llm.sleep(1, "keep")


async def _wake(serving: Serving, args: WakeForSync) -> None:
    await serving.llm.wake_up(args.tags)


Method = tuple[type[msgspec.Struct], Callable[[Serving, Any], Awaitable[None]]]
METHODS: dict[str, Method] = {
    "reload_weights": (ReloadWeights, _reload_weights),
    "update_weights": (UpdateWeights, _update_weights),
    "update_weights_nccl": (UpdateWeights, _update_weights),
    "pull_weights": (PullWeights, _pull_weights),
    "skyrl_start_weight_update": (StartSync, _start),
    "skyrl_finish_weight_update": (NoArguments, _finish),
    "skyrl_sleep_for_weight_sync": (SleepForSync, _sleep),
    "skyrl_wake_for_weight_sync": (WakeForSync, _wake),
}


async def collective_rpc(serving: Serving, request: Request) -> Response:
    """POST /collective_rpc: call the worker extension, or the command that a trainer's method stands for"""
    params = await commands.read_arguments(serving, request, commands.WorkerCallBody)
    has_extension = serving.config.weights.worker_extension_cls is not None
    if has_extension or params.method not in METHODS.keys() | REFUSED.keys():
        return await commands.call_worker(serving, request, params)
    if params.method in REFUSED:
        raise RequestError(f"{params.method} {REFUSED[params.method]}: {WAYS}", field="method", code="unsupported")
    if params.timeout is not None and not 0 < params.timeout <= LONGEST_RPC:
        raise invalid("timeout", f"must be above 0 and at most {LONGEST_RPC:g} seconds")
    kind, call = METHODS[params.method]
    arguments = _arguments(kind, params.args, params.kwargs)
    try:
        async with asyncio.timeout(params.timeout):
            await call(serving, arguments)
    except TimeoutError:
        raise EngineDead(f"{params.method} has not returned for {params.timeout:g} s", code="engine_hung") from None
    num_workers = serving.llm.num_engines * serving.config.parallel.num_ranks
    return body.reply(request, {"results": [None] * num_workers})


def _arguments(kind: type[K], args: list[Any], kwargs: dict[str, Any]) -> K:
    """The arguments of a method, by position and by name.  Raises RequestError."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    if len(args) > len(names):
        raise RequestError(f"at most {len(names)} arguments are taken, got {len(args)}", field="args")
    placed = dict(zip(names, args, strict=False))
    if twice := placed.keys() & kwargs.keys():
        raise RequestError(f"{min(twice)} is in args, too", field=f"kwargs.{min(twice)}")
    return body.convert(placed | kwargs, kind, "kwargs")
