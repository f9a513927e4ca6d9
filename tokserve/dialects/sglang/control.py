"""SGLang's control routes: pause, abort, cache, memory, adapters and checks, each a command of the engine."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import LONGEST_SHOWN, Conflict, RequestError, invalid
from tokserve.dialects.sglang import weights
from tokserve.dialects.sglang.replies import json, read_body
from tokserve.dialects.sglang.state import SglangState
from tokserve.features.weights.weight_routes import reset_weights
from tokserve.protocol.commands import MOST_STEPS
from tokserve.server.serving import Serving

POLL = 0.05  # seconds between two looks at a cache that is in use
LONGEST_WAIT = 600.0  # seconds
PUSHED = "__tensor__"  # SGLang's path of an adapter that came as tensors
MEMORY = ("kv_cache", "weights")
PAUSES = {"abort": "abort", "in_place": "keep", "retract": "retract"}  # modes there and here


class PauseGenerationBody(msgspec.Struct):
    """`mode`: abort, in_place (what runs goes on at continue_generation), or retract (on KV that is computed again)."""

    mode: str = "abort"


class AbortRequestBody(msgspec.Struct):
    """Which requests: one by its id, all whose id begins with it (`prefix`), or all."""

    request_id: str | None = msgspec.field(default=None, name="rid")
    abort_all: bool = False
    prefix: bool = False
    abort_message: str | None = None


class FlushBody(msgspec.Struct):
    """`timeout`: seconds to wait for running requests."""

    timeout: float | None = None


class MemoryBody(msgspec.Struct):
    """Which memory; null: all.  cuda_graph is ignored."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class LoadAdapterRouteBody(msgspec.Struct):
    """A PEFT directory and the adapter's name; `pinned` is ignored, as adapters stay loaded."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadAdapterRouteBody(msgspec.Struct):
    """Which adapter."""

    lora_name: str


class WeightsCheckerBody(msgspec.Struct):
    """`action`: checksum, snapshot, or compare (with the snapshot)."""

    action: str = "checksum"


class ProfileBody(msgspec.Struct):
    """`num_steps`: after which the profile ends by itself.  `output_dir` is ignored: traces go to --profiler-dir."""

    num_steps: int | None = None
    output_dir: str | None = None


class ContinueBody(msgspec.Struct):
    """A body in which nothing has an effect."""

    torch_empty_cache: bool = False


async def pause_generation(serving: Serving, request: Request) -> Response:
    """POST /pause_generation: stop generating"""
    params, headers = await read_body(serving, request, PauseGenerationBody)
    if params.mode not in PAUSES:
        raise invalid("mode", f"must be one of {', '.join(PAUSES)}, got {params.mode[:LONGEST_SHOWN]!r}")
    await serving.llm.pause_generation(mode=PAUSES[params.mode], clear_cache=params.mode == "abort")
    return json({"message": "Generation paused successfully.", "status": "ok"}, headers)


async def continue_generation(serving: Serving, request: Request) -> Response:
    """POST /continue_generation: commit a weight update of several calls, and resume"""
    _, headers = await read_body(serving, request, ContinueBody)
    await weights.commit_open(serving)
    await serving.llm.resume_generation()
    return json({"message": "Generation continued successfully.", "status": "ok"}, headers)


async def abort_request(serving: Serving, request: Request) -> Response:
    """POST /abort_request: end requests with their output so far; the reply is empty, also for an unknown id"""
    params, headers = await read_body(serving, request, AbortRequestBody)
    if params.abort_all:
        await serving.llm.abort_all()
    elif params.request_id and params.prefix:
        await serving.llm.abort_prefix(params.request_id)
    elif params.request_id:
        await serving.llm.abort([params.request_id])
    elif params.request_id is None:
        raise RequestError("give rid or abort_all", field="rid")
    return Response(status_code=200, headers=headers)


async def flush_cache(serving: Serving, request: Request) -> Response:
    """GET or POST /flush_cache: text; 400 while requests run, or wait without a pause, after `timeout` seconds"""
    params, headers = await read_body(serving, request, FlushBody)
    if params.timeout is not None and not 0 <= params.timeout <= LONGEST_WAIT:
        raise invalid("timeout", f"must be 0 to {LONGEST_WAIT:g} seconds")
    end = asyncio.get_running_loop().time() + (params.timeout or 0.0)
    while count := await _num_busy(serving):
        if asyncio.get_running_loop().time() >= end:
            message = f"The cache was not flushed: {count} requests are running or waiting.\n"
            return Response(message, status_code=400, headers=headers, media_type="text/plain")
        await asyncio.sleep(POLL)
    await serving.llm.reset_prefix_cache()
    return Response("Cache flushed.\n", headers=headers, media_type="text/plain")


async def _num_busy(serving: Serving) -> int:
    """How many requests hold KV, or will before anybody says /continue_generation."""
    await serving.llm.call("stats")
    paused = (await serving.llm.fresh_status()).paused
    return serving.llm.stats.running + (0 if paused else serving.llm.stats.waiting)


async def release_memory_occupation(serving: Serving, request: Request) -> Response:
    """POST /release_memory_occupation: release memory"""
    params, headers = await read_body(serving, request, MemoryBody)
    memory = _memory(params)
    if memory:
        await serving.llm.call("release_memory", tags=memory, mode="abort")
    return json(None, headers)


async def resume_memory_occupation(serving: Serving, request: Request) -> Response:
    """POST /resume_memory_occupation: without weights, requests wait until some are pushed"""
    params, headers = await read_body(serving, request, MemoryBody)
    if memory := _memory(params):
        await serving.llm.wake_up([*memory, "scheduling"] if set(memory) == set(MEMORY) else memory)
    return json(None, headers)


def _memory(params: MemoryBody) -> list[str]:
    return [tag for tag in MEMORY if not params.tags or tag in params.tags]


async def load_lora_adapter(serving: Serving, request: Request) -> Response:
    """POST /load_lora_adapter: load an adapter"""
    params, headers = await read_body(serving, request, LoadAdapterRouteBody)
    await serving.llm.load_lora_adapter(params.lora_name, params.lora_path)
    return json(await loaded_adapters(serving, f"LoRA adapter '{params.lora_name}' loaded"), headers)


async def unload_lora_adapter(serving: Serving, request: Request) -> Response:
    """POST /unload_lora_adapter: unload an adapter"""
    params, headers = await read_body(serving, request, UnloadAdapterRouteBody)
    await serving.llm.unload_lora_adapter(params.lora_name)
    return json(await loaded_adapters(serving, f"LoRA adapter '{params.lora_name}' unloaded"), headers)


async def loaded_adapters(serving: Serving, message: str) -> dict[str, Any]:
    """A reply that lists the adapters that there are."""
    status = await serving.llm.fresh_status()
    loaded = {adapter.name: adapter.path or PUSHED for adapter in status.adapters}
    return {"success": True, "message": message, "loaded_adapters": loaded}


async def weights_checker(serving: Serving, request: Request) -> Response:
    """POST /weights_checker: checksums in memory, `compare` with this API process' last `snapshot`, `reset_tensors`"""
    params, headers = await read_body(serving, request, WeightsCheckerBody)
    if params.action not in ("checksum", "snapshot", "compare", "reset_tensors"):
        raise invalid("action", "must be checksum, snapshot, compare or reset_tensors")
    if params.action == "reset_tensors":
        await reset_weights(serving.llm)
        return json({"success": True, "message": "Success."}, headers)
    checksums = await serving.llm.weight_checksums()
    reply: dict[str, Any] = {"success": True, "message": "Success."}
    if params.action == "checksum":
        reply["checksums"] = checksums
    elif params.action == "snapshot":
        serving.state_of(SglangState).snapshot = checksums
    else:
        before = serving.state_of(SglangState).snapshot
        if before is None:
            raise Conflict("there is no snapshot to compare with", field="action")
        names = sorted(before.keys() | checksums.keys())
        if wrong := [name for name in names if before.get(name) != checksums.get(name)]:
            raise Conflict(f"{len(wrong)} tensors differ from the snapshot: {', '.join(wrong[:5])}", field="action")
    return json(reply, headers)


async def start_profile(serving: Serving, request: Request) -> Response:
    """POST /start_profile: start to record a profile"""
    params, headers = await read_body(serving, request, ProfileBody)
    if params.num_steps is not None and not 1 <= params.num_steps <= MOST_STEPS:
        raise invalid("num_steps", f"must be 1 to {MOST_STEPS}")
    started = await serving.llm.start_profile(max_iterations=params.num_steps)
    return json({"success": True, "message": "Start profiling."} | started, headers)


async def stop_profile(serving: Serving, request: Request) -> Response:
    """POST /stop_profile: end the profile: write the trace and tables of times"""
    return json({"success": True, "message": "Stop profiling."} | await serving.llm.stop_profile())
