"""The routes that AReaL adds to vLLM and its trainer calls: pause, continue, weights from a directory or over a group.

They are routes of `commands` and `weights` under other names, with AReaL's replies.  AReaL sends weights in pieces
between a pause and its end, and says nowhere which piece is the last: /areal_continue_generation commits them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import Conflict, RequestError
from tokserve.features.weights import open_updates
from tokserve.server.admin.commands import read_arguments
from tokserve.server.http import body, errors
from tokserve.server.serving import Serving


class ArealState:
    """`serving.state_of(ArealState)` is a server's.  `announced`: the tensors that come next.  `is_staged`: whether the
    open update is AReaL's."""

    def __init__(self, serving: Serving) -> None:
        self.announced: dict[str, Any] | None = None
        self.is_staged = False
        self._llm = serving.llm
        self._names: dict[int, str] = {}  # of received adapters, by number
        self._unloading: set[asyncio.Task[None]] = set()

    def note_adapter(self, number: int, name: str) -> None:
        """An adapter was received.  One with another name and the same number is unloaded when its requests have ended,
        which may be after the end of a pause."""
        before, self._names[number] = self._names.get(number), name
        if before not in (None, name):
            task = asyncio.create_task(self._unload(str(before)))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, name: str) -> None:
        with suppress(RequestError):  # it was unloaded already
            await self._llm.unload_lora_adapter(name)


class ArealUpdateBody(msgspec.Struct, forbid_unknown_fields=True):
    """A complete update from a checkpoint directory.  `abort_all_requests` is ignored: the trainer pauses first, which
    aborts them; so is `load_format`, as there is only one."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False


class ArealAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter from a directory.  Its number, its kind and the name of the base model are ignored."""

    lora_model_path: str
    lora_name: str
    lora_int_id: int | None = None
    base_model_name: str | None = None
    load_format: str | None = None
    abort_all_requests: bool = False


class ArealGroupBody(msgspec.Struct, forbid_unknown_fields=True):
    """A process group of torch.distributed to join; this server is the rank `rank_offset`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str
    group_name: str


class ArealMetaBody(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors that rank 0 broadcasts next, in this order.  There is one group, whatever its name."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str | None = None


class ArealAdapterMetaBody(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter's tensors that rank 0 broadcasts next, in this order, and its configuration.  An adapter with the same
    `lora_int_id` and another name is unloaded.  There is one group, whatever its name."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    lora_name: str
    lora_int_id: int
    lora_rank: int
    lora_alpha: float
    lora_target_modules: list[str] | str = []
    lora_bias: str = "none"
    base_model_name: str | None = None
    group_name: str | None = None


def _done(request: Request, message: str) -> Response:
    return body.reply(request, {"success": True, "message": message})


async def pause(serving: Serving, request: Request) -> Response:
    """POST /areal_pause_generation: as /pause?mode=abort"""
    await serving.llm.pause_generation(mode="abort")
    return _done(request, "Generation paused and all requests aborted")


async def resume(serving: Serving, request: Request) -> Response:
    """POST /areal_continue_generation: commit the weights received over a group, then as /resume"""
    areal = serving.state_of(ArealState)
    if areal.is_staged:
        areal.is_staged = False
        await open_updates.commit(serving.llm)
    await serving.llm.resume_generation()
    return _done(request, "Generation continued")


async def update_weights(serving: Serving, request: Request) -> Response:
    """POST /areal_update_weights: as /update_weights with weight_dir"""
    params = await read_arguments(serving, request, ArealUpdateBody)
    with errors.named_as({"weight_dir": "model_path"}):
        await serving.llm.update_weights({"weight_dir": params.model_path})
    return _done(request, f"Weights updated from {params.model_path}")


async def update_adapter(serving: Serving, request: Request) -> Response:
    """POST /areal_update_weights_lora: as /v1/load_lora_adapter"""
    params = await read_arguments(serving, request, ArealAdapterBody)
    with errors.named_as({"lora_path": "lora_model_path"}):
        await serving.llm.load_lora_adapter(params.lora_name, params.lora_model_path)
    return _done(request, f"Adapter {params.lora_name} loaded from {params.lora_model_path}")


async def join_group(serving: Serving, request: Request) -> Response:
    """POST /areal_init_weights_update_group: as /init_weight_transfer_engine, for a group of torch.distributed"""
    params = await read_arguments(serving, request, ArealGroupBody, strict=False)  # the port is a text
    options: dict[str, Any] = msgspec.structs.asdict(params) | {"rendezvous": "torch"}
    await serving.llm.init_weight_transfer_engine({"init_info": options})
    return _done(request, "Weight update group joined")


async def announce(serving: Serving, request: Request) -> Response:
    """POST /areal_set_update_weight_meta: which tensors the next /areal_update_weights_xccl receives"""
    params = await read_arguments(serving, request, ArealMetaBody)
    serving.state_of(ArealState).announced = {
        "names": params.names,
        "dtype_names": params.dtypes,
        "shapes": params.shapes,
    }
    return _done(request, f"{len(params.names)} tensors announced")


async def receive_tensors(serving: Serving, request: Request) -> Response:
    """POST /areal_update_weights_xccl: receive the announced tensors"""
    await read_arguments(serving, request, msgspec.defstruct("ArealReceiveBody", []))
    areal = serving.state_of(ArealState)
    announced, areal.announced = areal.announced, None
    if announced is None:
        raise Conflict("no tensors are announced: call /areal_set_update_weight_meta first, at the same API process")
    if await _staged(serving, announced):
        areal.is_staged = False
        await open_updates.commit(serving.llm)
    return _done(request, f"{len(announced['names'])} tensors received")


async def _staged(serving: Serving, announced: dict[str, Any]) -> bool:
    """Receive tensors; whether a commit has to follow now.  If that fails, AReaL's update is over: the trainer begins
    another."""
    areal = serving.state_of(ArealState)

    def opened() -> None:
        areal.is_staged = True

    staged = False
    try:
        whole = await open_updates.stage(serving.llm, announced, opened)
        areal.is_staged = staged = True
        return whole
    finally:
        if not staged and areal.is_staged:
            areal.is_staged = False
            with suppress(RequestError):  # it has been rolled back already
                await serving.llm.abort_weight_update()


async def announce_adapter(serving: Serving, request: Request) -> Response:
    """POST /areal_set_update_weight_meta_lora: as /areal_update_weights_lora_xccl has it, whose body says it too"""
    params = await read_arguments(serving, request, ArealAdapterMetaBody)
    return _done(request, f"{len(params.names)} tensors of the adapter {params.lora_name} announced")


async def receive_adapter(serving: Serving, request: Request) -> Response:
    """POST /areal_update_weights_lora_xccl: receive an adapter, and load it"""
    adapter = await read_arguments(serving, request, ArealAdapterMetaBody)
    config = {
        "peft_type": "LORA",
        "r": adapter.lora_rank,
        "lora_alpha": adapter.lora_alpha,
        "bias": adapter.lora_bias,
        "target_modules": adapter.lora_target_modules,
    }
    update = {"names": adapter.names, "dtype_names": adapter.dtypes, "shapes": adapter.shapes}

    async def stage(update_id: str) -> None:
        await serving.llm.update_weights({"update_info": update, "update_id": update_id})

    with errors.named_as({"lora_config": "lora_rank"}):
        await open_updates.push_adapter(serving.llm, adapter.lora_name, config, stage)
    serving.state_of(ArealState).note_adapter(adapter.lora_int_id, adapter.lora_name)
    return _done(request, f"Adapter {adapter.lora_name} received")
