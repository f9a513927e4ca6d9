"""The routes that AReaL adds to vLLM and its trainer calls: pause, continue, weights from a directory or over a group.

They are routes of `commands` and `weights` under other names, with AReaL's replies.  AReaL sends weights in pieces
between a pause and its end, and says nowhere which piece is the last: /areal_continue_generation commits them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import Conflict, RequestError
from tokserve.features.weights import open_updates
from tokserve.server.admin.commands import read
from tokserve.server.http import body, errors
from tokserve.server.serving import Serving


class ArealState:
    """`serving.state_of(ArealState)` is a server's.  `announced`: the tensors that come next.  `is_staged`: whether the
    open update is AReaL's."""

    def __init__(self, serving: Serving) -> None:
        self.announced: dict[str, Any] | None = None
        self.is_staged = False


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
    params = await read(serving, request, ArealUpdateBody)
    with errors.named_as({"weight_dir": "model_path"}):
        await serving.llm.update_weights({"weight_dir": params.model_path})
    return _done(request, f"Weights updated from {params.model_path}")


async def update_adapter(serving: Serving, request: Request) -> Response:
    """POST /areal_update_weights_lora: as /v1/load_lora_adapter"""
    params = await read(serving, request, ArealAdapterBody)
    with errors.named_as({"lora_path": "lora_model_path"}):
        await serving.llm.load_lora_adapter(params.lora_name, params.lora_model_path)
    return _done(request, f"Adapter {params.lora_name} loaded from {params.lora_model_path}")


async def join_group(serving: Serving, request: Request) -> Response:
    """POST /areal_init_weights_update_group: as /init_weight_transfer_engine, for a group of torch.distributed"""
    params = await read(serving, request, ArealGroupBody, strict=False)  # the port is a text
    options: dict[str, Any] = msgspec.structs.asdict(params) | {"rendezvous": "torch"}
    await serving.llm.init_weight_transfer_engine({"init_info": options})
    return _done(request, "Weight update group joined")


async def announce(serving: Serving, request: Request) -> Response:
    """POST /areal_set_update_weight_meta: which tensors the next /areal_update_weights_xccl receives"""
    params = await read(serving, request, ArealMetaBody)
    serving.state_of(ArealState).announced = {
        "names": params.names,
        "dtype_names": params.dtypes,
        "shapes": params.shapes,
    }
    return _done(request, f"{len(params.names)} tensors announced")


async def receive(serving: Serving, request: Request) -> Response:
    """POST /areal_update_weights_xccl: receive the announced tensors"""
    await read(serving, request, msgspec.defstruct("ArealReceiveBody", []))
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


async def refuse_adapter_tensors(serving: Serving, request: Request) -> Response:
    """Refused: an adapter's tensors over a group"""
    raise RequestError(
        "adapters are loaded from directories here, not over a process group: set the trainer's weight_update_mode to "
        "disk",
        code="unsupported",
    )
