"""SGLang's weight updates as the engine's transactions.

There, every call changes some tensors at once; here an update holds all of them and takes effect as a whole.  So a call
beside generation must bring them all, and calls while generation is paused, or after /begin_weight_update, are parts of
one update that /continue_generation or /end_weight_update commits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve import checkpoint
from tokserve.base.errors import LONGEST_SHOWN, Conflict, RequestError, StartError, invalid
from tokserve.dialects.sglang.replies import json, read_body
from tokserve.dialects.sglang.state import SglangState
from tokserve.features.weights import open_updates
from tokserve.server.http import errors, workers
from tokserve.server.serving import Serving

GROUP = "weight_update_group"  # the name of a group that has none
FORMATS = ("auto", "safetensors")
ROUTES = (
    "send a safetensors file to POST /update_weights (content type application/octet-stream), or use shared memory or "
    "CUDA IPC handles as JSON"
)


class DiskBody(msgspec.Struct):
    """A complete update from a directory.  The fields after `weight_version` have no effect: no KV of other weights
    is ever used, and an update neither pauses nor ends a pause."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int | None = None
    manifest: Any = None


class DistributedBody(msgspec.Struct):
    """Tensors that rank 0 of the group broadcasts next, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    flush_cache: bool = True


class GroupBody(msgspec.Struct):
    """The group to join; this server is the rank `rank_offset`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "nccl"
    group_name: str | None = None
    pp_rank: int = 0


class DestroyBody(msgspec.Struct):
    """There is one group, whatever its name."""

    group_name: str | None = None


class SglangVersionBody(msgspec.Struct):
    """A new version for the current weights; requests that run are aborted unless told otherwise."""

    new_version: str
    abort_all_requests: bool = True


class BracketBody(msgspec.Struct):
    """The beginning or the end of an update of several calls."""

    weight_version: str | None = None


def _check_format(load_format: str | None) -> None:
    if load_format is not None and load_format not in FORMATS:
        raise invalid("load_format", f"must be one of {', '.join(FORMATS)}, got {load_format[:LONGEST_SHOWN]!r}")


async def from_disk(serving: Serving, request: Request) -> Response:
    """POST /update_weights_from_disk: a complete update from a directory"""
    params, headers = await read_body(serving, request, DiskBody)
    _check_format(params.load_format)
    errors.refuse_unsupported("manifest", params.manifest)
    if params.abort_all_requests:
        await serving.llm.abort_all()
    directory = await workers.run(workers.SMALL, lambda: _located(params.model_path))
    serving.state_of(SglangState).model_paths[directory] = params.model_path
    whole = {"weight_dir": directory, "weight_version": params.weight_version}
    with errors.named_as({"weight_dir": "model_path"}):
        await serving.llm.update_weights(whole)
    status = await serving.llm.fresh_status()
    paused = serving.llm.stats.running + serving.llm.stats.waiting if status.paused else 0
    done = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": paused}
    return json(done | {"weight_version": status.weight_version}, headers)


def _located(model_path: str) -> str:
    """The directory of a model as `serve` takes its name.  Raises RequestError."""
    if Path(model_path).is_absolute() or model_path.count("/") != 1 or Path(model_path).exists():
        return model_path
    try:
        return str(checkpoint.locate(model_path))
    except StartError as error:
        raise RequestError(f"model_path: {error}", field="model_path") from None


async def init_group(serving: Serving, request: Request) -> Response:
    """POST /init_weights_update_group: join the trainer's process group"""
    params, headers = await read_body(serving, request, GroupBody)
    names = ("master_address", "master_port", "rank_offset", "world_size", "backend")
    info = {name: getattr(params, name) for name in names}
    info |= {"rendezvous": "torch", "group_name": params.group_name or GROUP}
    await serving.llm.init_weight_transfer_engine({"init_info": info})
    return json({"success": True, "message": "Succeeded to initialize the group."}, headers)


async def destroy_group(serving: Serving, request: Request) -> Response:
    """POST /destroy_weights_update_group: an open update is rolled back"""
    _, headers = await read_body(serving, request, DestroyBody)
    await serving.llm.shutdown_weight_transfer_engine()
    return json({"success": True, "message": "Succeeded to destroy the group."}, headers)


async def from_distributed(serving: Serving, request: Request) -> Response:
    """POST /update_weights_from_distributed: receive tensors from the process group"""
    params, headers = await read_body(serving, request, DistributedBody)
    _check_format(params.load_format)
    if params.abort_all_requests:
        await serving.llm.abort_all()
    update = {"names": params.names, "dtype_names": params.dtypes, "shapes": params.shapes}

    def forget_version() -> None:  # it was that of an update that was rolled back
        serving.state_of(SglangState).version = None

    is_whole = await open_updates.stage(serving.llm, update, forget_version)
    _note_version(serving, params.weight_version)
    message = (
        f"Received {len(params.names)} tensors; the update takes effect at /continue_generation or /end_weight_update."
    )
    if is_whole:
        await commit_open(serving)
        message = "Succeeded to update parameters online."
    return json({"success": True, "message": message}, headers)


def _note_version(serving: Serving, version: str | None) -> None:
    """Keep the version that the open update will have."""
    if version is not None:
        serving.state_of(SglangState).version = version


async def commit_open(serving: Serving) -> bool:
    sglang = serving.state_of(SglangState)
    version, sglang.version = sglang.version, None
    return await open_updates.commit(serving.llm, version)


async def begin_update(serving: Serving, request: Request) -> Response:
    """POST /begin_weight_update: begin an update, which lasts until /end_weight_update"""
    params, headers = await read_body(serving, request, BracketBody)
    await serving.llm.start_weight_update()
    serving.state_of(SglangState).version = params.weight_version
    return json({"success": True, "message": "Weight update started."}, headers)


async def end_update(serving: Serving, request: Request) -> Response:
    """POST /end_weight_update: commit the staged weights"""
    params, headers = await read_body(serving, request, BracketBody)
    _note_version(serving, params.weight_version)
    if not await commit_open(serving):
        raise Conflict("no weight update is open")
    return json({"success": True, "message": "Weight update finished."}, headers)


async def refuse_pickle(serving: Serving, request: Request) -> Response:
    """Refused: the body holds a pickle, which can run any code"""
    tensors = request.url.path.rstrip("/").endswith("_tensor")
    field = "serialized_named_tensors" if tensors else "zmq_handles"
    what = "is a pickle, and nothing is unpickled here" if tensors else "are CUDA IPC handles in a pickle"
    raise RequestError(f"{field} {what}: {ROUTES} (docs/rl.md)", field=field, code="unsupported")


async def update_version(serving: Serving, request: Request) -> Response:
    """POST /update_weight_version: set the version of the current weights"""
    params, headers = await read_body(serving, request, SglangVersionBody)
    await serving.llm.update_weight_version(params.new_version)  # first: a version that is refused aborts nothing
    if params.abort_all_requests:
        await serving.llm.abort_all()
    message = f"Weight version updated to {params.new_version}"
    return json({"success": True, "message": message, "new_version": params.new_version}, headers)


async def get_version(serving: Serving, request: Request) -> Response:
    """GET or POST /get_weight_version: the version of the current weights"""
    return json({"weight_version": (await serving.llm.fresh_status()).weight_version})
