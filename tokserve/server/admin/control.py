"""Control routes: pause, sleep, weight updates, adapters and worker calls, under vLLM's names.

Parameters come in the body (JSON or msgpack) or in the query; the body wins.  Each route is one command of the engine,
which decides whether its state allows it, so every front end can serve the route.  `auth` checks the caller.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.errors import Conflict, EngineDead, RequestError, invalid
from tokserve.server.http import body
from tokserve.server.http.disconnect import ClientDisconnected
from tokserve.server.serving import Serving

T = TypeVar("T", bound=msgspec.Struct)
TENSORS = ("application/octet-stream", "application/safetensors", "application/x-safetensors")
PIECE = 4 << 20  # bytes of a weight body that go to the engine at a time
LEVELS = ("scheduling", "kv_cache", "weights")  # what each level of sleep releases in addition
BLANK = 1 << 10  # so many bytes of white space count as no body
LONGEST_RPC = 1e6  # seconds: limit of a timeout
SLOW_PIECE = 1.0  # seconds after which a smaller piece goes, too
DRAIN_SECONDS = 60.0  # for the rest of a refused weight body
UNDER_WAY = 8  # limit of pieces sent and not yet acknowledged


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    """What becomes of running requests and of the prefix cache; `lease`: seconds without a extension after which
    generation goes on; `take_over`: a longer one of another pause does not count."""

    mode: str = "abort"
    wait_for_inflight_requests: bool = False
    clear_cache: bool = True
    lease: float | None = None
    take_over: bool = False


class SleepBody(msgspec.Struct, forbid_unknown_fields=True):
    """How much memory to release, and what becomes of requests.  `tags` (SkyRL's) are ignored."""

    level: int = 1
    mode: str = "abort"
    tags: list[Literal["weights", "kv_cache"]] | None = None


class WakeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which memory to allocate again; default: all."""

    tags: list[str] | None = None


class ResetBody(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's options.  `reset_external`: drop the earlier outputs that are kept as drafts as well.  The others are
    ignored: running requests keep their KV pages."""

    reset_running_requests: bool = False
    reset_external: bool = False
    reset_connector: bool = False


class AddCorpusBody(msgspec.Struct, forbid_unknown_fields=True):
    """Outputs, as ids, that are drafts for requests of a group with the same model and cache salt."""

    draft_group: str
    token_ids: list[list[int]]
    model: str | None = None
    cache_salt: str = ""


class RemoveCorpusBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which group."""

    draft_group: str


class InitBody(msgspec.Struct, forbid_unknown_fields=True):
    """Options of the backend; `take_over`: roll back an open update."""

    init_info: dict[str, Any]
    take_over: bool = False


class StartBody(msgspec.Struct, forbid_unknown_fields=True):
    """Whether tensors have the names of the checkpoint; of a delta, the version and the checksum of what it changes.
    `lease`: seconds without a call after which it is rolled back; `take_over`: roll back an update that is open."""

    is_checkpoint_format: bool = True
    base_version: str | None = None
    base_checksum: str | None = None
    lease: float | None = None
    take_over: bool = False


class UpdateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors of an open update, or a complete update from a directory.

    `skip_prefix_cache_reset` (prime-rl's) is ignored: the KV cache of other weights is never found anyway.
    """

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: str | None = None
    weight_version: str | None = None
    skip_prefix_cache_reset: bool = False
    recompute_kv: bool = False
    take_over: bool = False
    update_id: str | None = None


class FinishBody(msgspec.Struct, forbid_unknown_fields=True):
    """The version of the new weights; of a delta, the checksum that its result must have.  `recompute_kv`: requests in
    flight go on with KV of the new weights."""

    weight_version: str | None = None
    checksum: str | None = None
    recompute_kv: bool = False
    update_id: str | None = None


class AbortUpdateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which update; default: the one that is open."""

    update_id: str | None = None


class VersionBody(msgspec.Struct, forbid_unknown_fields=True):
    """A new version for the current weights."""

    new_version: str


class CheckerBody(msgspec.Struct, forbid_unknown_fields=True):
    """`action`: checksum, or compare (with `baseline`).  `names`: memory, or checkpoint."""

    action: str
    baseline: dict[str, str] | None = None
    names: str | None = None


class WeightQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What a trainer wants to know beside version and epoch."""

    checksum: bool = False
    tensors: bool = False


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """A PEFT directory and the adapter's name; `load_inplace` false: refuse a name that is in use."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which adapter; `lora_int_id` (vLLM's) is ignored."""

    lora_name: str
    lora_int_id: int | None = None


class RpcBody(msgspec.Struct, forbid_unknown_fields=True):
    """A call of the worker extension."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


async def read(serving: Serving, request: Request, kind: type[T]) -> T:
    """The parameters from query and body.  Unknown names in the query are ignored: proxies may add some."""
    query = request.query_params
    values: dict[str, Any] = {
        name: query.getlist(name) if name == "tags" else query[name] for name in kind.__struct_fields__ if name in query
    }
    raw = await serving.bodies.read(request)
    if len(raw) > BLANK or bytes(raw).strip():
        sent = await serving.bodies.decode(request, raw)
        if sent is not None and not isinstance(sent, dict):
            raise RequestError("the body must be an object")
        values |= sent or {}
    return body.convert(values, kind, strict=False)


# --- pause ---


async def pause(serving: Serving, request: Request) -> Response:
    """POST /pause"""
    params = await read(serving, request, PauseBody)
    await serving.llm.pause_generation(
        mode=params.mode, wait_for_inflight_requests=params.wait_for_inflight_requests, clear_cache=params.clear_cache,
        lease=params.lease, take_over=params.take_over,
    )  # fmt: skip
    return body.reply(request, {"status": "paused"})


async def extend_pause(serving: Serving, request: Request) -> Response:
    """POST /extend_pause"""
    await serving.llm.extend_pause()
    return body.reply(request, {"status": "paused"})


async def resume(serving: Serving, request: Request) -> Response:
    """POST /resume"""
    await serving.llm.resume_generation()
    return body.reply(request, {"status": "resumed"})


async def is_paused(serving: Serving, request: Request) -> Response:
    """GET /is_paused"""
    return body.reply(request, {"is_paused": await serving.llm.is_paused()})


async def state(serving: Serving, request: Request) -> Response:
    """GET /inference/v1/state: what the engine does, with which weights and arithmetic"""
    state = await serving.llm.call("state")
    names = ("state", "weight_version", "epoch", "running", "waiting", "since", "reason", "paused_since")
    arithmetic = serving.llm.ready.facts.get("arithmetic")
    return body.reply(request, {name: state[name] for name in names} | {"arithmetic": arithmetic})


async def liveness(serving: Serving, request: Request) -> Response:
    """GET /liveness: whether the engine's loop runs"""
    await serving.probe("ping", serving.config.server.liveness_timeout)
    return body.reply(request, {})


# --- sleep and caches ---


async def sleep(serving: Serving, request: Request) -> Response:
    """POST /sleep"""
    params = await read(serving, request, SleepBody)
    if params.level not in range(len(LEVELS)):  # also a level that does not fit in a message
        raise invalid("level", f"must be 0, 1 or 2, got {str(params.level)[:20]}")
    await serving.llm.sleep(params.level, params.mode)
    return body.reply(request, {"status": "sleeping", "level": params.level})


async def wake_up(serving: Serving, request: Request) -> Response:
    """POST /wake_up"""
    params = await read(serving, request, WakeBody)
    await serving.llm.wake_up(params.tags)
    return body.reply(request, {"status": "sleeping" if serving.llm.status.sleeping else "awake"})


async def is_sleeping(serving: Serving, request: Request) -> Response:
    """GET /is_sleeping"""
    return body.reply(request, {"is_sleeping": await serving.llm.is_sleeping()})


async def release_kv_cache_memory(serving: Serving, request: Request) -> Response:
    """POST /release_kv_cache_memory"""
    await serving.llm.release_kv_cache_memory()
    return body.reply(request, {"success": True})


async def reset_prefix_cache(serving: Serving, request: Request) -> Response:
    """POST /reset_prefix_cache"""
    params = await read(serving, request, ResetBody)
    success = await serving.llm.reset_prefix_cache(reset_external=params.reset_external)
    return body.reply(request, {"success": success})


# --- drafts ---


async def add_draft_corpus(serving: Serving, request: Request) -> Response:
    """POST /add_draft_corpus"""
    params = await read(serving, request, AddCorpusBody)
    for index, ids in enumerate(params.token_ids):
        if ids and not (min(ids) >= 0 and max(ids) < serving.llm.ready.vocab_size):
            field = f"token_ids[{index}]"
            raise RequestError(f"{field} has an id that is not in the vocabulary", field=field)
    await serving.find_model(params.model)
    reply = await serving.llm.add_draft_corpus(
        params.draft_group, params.token_ids, lora_name=serving.adapter(params.model), cache_salt=params.cache_salt
    )
    return body.reply(request, reply)


async def remove_draft_corpus(serving: Serving, request: Request) -> Response:
    """POST /remove_draft_corpus"""
    params = await read(serving, request, RemoveCorpusBody)
    return body.reply(request, await serving.llm.remove_draft_corpus(params.draft_group))


# --- weights ---


async def init_weight_transfer_engine(serving: Serving, request: Request) -> Response:
    """POST /init_weight_transfer_engine"""
    params = await read(serving, request, InitBody)
    info = {"init_info": params.init_info}
    return body.reply(request, await serving.llm.init_weight_transfer_engine(info, take_over=params.take_over))


async def shutdown_weight_transfer_engine(serving: Serving, request: Request) -> Response:
    """POST /shutdown_weight_transfer_engine"""
    await serving.llm.shutdown_weight_transfer_engine()
    return body.reply(request, {"message": "Weight transfer shut down"})


async def start_weight_update(serving: Serving, request: Request) -> Response:
    """POST /start_weight_update"""
    params = await read(serving, request, StartBody)
    started = await serving.llm.start_weight_update(
        params.is_checkpoint_format, params.base_version, params.base_checksum,
        lease=params.lease, take_over=params.take_over,
    )  # fmt: skip
    return body.reply(request, started)


async def update_weights(serving: Serving, request: Request) -> Response:
    """POST /update_weights"""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() in TENSORS:
        await _stream_weights(serving, request)
        return body.reply(request, {"message": "Weights updated"})
    params = await read(serving, request, UpdateBody)
    if (params.update_info is None) == (params.weight_dir is None):
        raise RequestError("give update_info (inside an update) or weight_dir (a complete one)", field="update_info")
    if params.weight_dir is not None:
        await serving.llm.update_weights({
            "weight_dir": params.weight_dir, "weight_version": params.weight_version,
            "recompute_kv": params.recompute_kv, "take_over": params.take_over,
        })  # fmt: skip
    else:
        for name in ("recompute_kv", "take_over"):
            if getattr(params, name):
                raise invalid(name, "goes with weight_dir here; else with finish_weight_update or start_weight_update")
        await serving.llm.update_weights({"update_info": params.update_info, "update_id": params.update_id})
    status = serving.llm.status
    return body.reply(
        request, {"message": "Weights updated", "weight_version": status.weight_version, "epoch": status.epoch}
    )


class _WeightBody:
    """A safetensors file as it arrives."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._more = True

    async def _part(self) -> bytes:
        message = await self._request.receive()
        if message["type"] == "http.disconnect":
            self._more = False
            raise ClientDisconnected
        self._more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def pieces(self) -> AsyncIterator[tuple[bytes, bool]]:
        """Pieces of at least PIECE bytes, smaller ones if they come slowly: (bytes, whether they are the last).

        Raises `ClientDisconnected`.
        """
        buffer, began = bytearray(), time.monotonic()
        while self._more:
            buffer += await self._part()
            if len(buffer) >= PIECE or not self._more or time.monotonic() - began > SLOW_PIECE:
                yield bytes(buffer), not self._more
                buffer.clear()
                began = time.monotonic()

    async def drain(self) -> None:
        """Read what is left of a refused body, for a while: most clients read no reply before they have sent it."""
        with suppress(TimeoutError, ClientDisconnected):
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._more:
                    await self._part()


async def _stream_weights(serving: Serving, request: Request) -> None:
    """Send a safetensors file to the engine piece by piece, as it arrives; it is never held as a whole."""
    file = _WeightBody(request)
    try:
        await _feed(serving, file, request.query_params.get("update_id"))
    except RequestError:
        await file.drain()
        raise


async def _feed(serving: Serving, file: _WeightBody, update_id: str | None) -> None:
    stream = secrets.token_hex(8)
    await serving.llm.begin_weight_stream(stream, update_id)  # ties the file to the open update
    sent: deque[asyncio.Task[None]] = (
        deque()
    )  # several in flight: the engine acknowledges a piece only between two steps
    try:
        async for piece, last in file.pieces():
            sent.append(asyncio.create_task(serving.llm.feed_weights(stream, piece, last=last)))
            if len(sent) == UNDER_WAY:
                await sent.popleft()
        while sent:  # in order: the first failure has the reason, later ones only say that no update is open
            await sent.popleft()
    except ClientDisconnected:
        with suppress(RequestError):  # the engine ends the update with this error
            await serving.llm.feed_weights(stream, b"", broken=True)
        raise
    finally:
        for task in sent:
            task.cancel()


async def finish_weight_update(serving: Serving, request: Request) -> Response:
    """POST /finish_weight_update"""
    params = await read(serving, request, FinishBody)
    done = await serving.llm.finish_weight_update(
        params.weight_version, params.checksum, recompute_kv=params.recompute_kv, update_id=params.update_id
    )
    return body.reply(request, done)


async def abort_weight_update(serving: Serving, request: Request) -> Response:
    """POST /abort_weight_update"""
    params = await read(serving, request, AbortUpdateBody)
    await serving.llm.abort_weight_update(params.update_id)
    return body.reply(request, {"message": "Weight update aborted"})


async def update_weight_version(serving: Serving, request: Request) -> Response:
    """POST /update_weight_version"""
    params = await read(serving, request, VersionBody)
    await serving.llm.update_weight_version(params.new_version)
    return body.reply(request, {"success": True, "new_version": params.new_version})


async def load_lora_adapter(serving: Serving, request: Request) -> Response:
    """POST /v1/load_lora_adapter"""
    params = await read(serving, request, LoadAdapterBody)
    loaded = await serving.llm.load_lora_adapter(params.lora_name, params.lora_path, params.load_inplace)
    message = f"Success: LoRA adapter '{params.lora_name}' loaded"
    return body.reply(request, {"success": True, "message": message} | loaded)


async def unload_lora_adapter(serving: Serving, request: Request) -> Response:
    """POST /v1/unload_lora_adapter"""
    params = await read(serving, request, UnloadAdapterBody)
    await serving.llm.unload_lora_adapter(params.lora_name)
    message = f"Success: LoRA adapter '{params.lora_name}' unloaded"
    return body.reply(request, {"success": True, "message": message, "lora_name": params.lora_name})


async def weights(serving: Serving, request: Request) -> Response:
    """GET /weight_info: which weights serve; `checksum`: compute their checksum; `tensors`: list their tensors"""
    params = await read(serving, request, WeightQuery)
    reply: dict[str, Any] = {}
    if params.tensors:
        reply |= await serving.llm.call("weight_coordinates") | {"delta_format": "tokserve-delta-1"}
    if params.checksum:
        await serving.llm.call("weights_checksum")
    status = await serving.llm.fresh_status()
    known = {"weight_version": status.weight_version, "epoch": status.epoch, "checksum": status.checksum}
    return body.reply(request, known | {"last_failure": status.failure} | reply)


async def weight_checker(serving: Serving, request: Request) -> Response:
    """POST /weight_checker"""
    params = await read(serving, request, CheckerBody)
    if params.action not in ("checksum", "compare"):
        raise invalid("action", f"must be checksum or compare, got {params.action[:200]!r}")
    if params.action == "compare" and params.baseline is None:
        raise RequestError("compare needs a baseline", field="baseline")
    if params.names not in (None, "memory", "checkpoint"):
        raise invalid("names", f"must be memory or checkpoint, got {params.names[:200]!r}")
    if params.action == "checksum":
        return body.reply(request, await _checksums(serving, params.names))
    baseline, tied = params.baseline or {}, {}
    if params.names == "checkpoint":
        checksums = await serving.llm.checkpoint_checksums()
        current, tied = checksums["checkpoint"], checksums["tied"]
    else:
        current = await serving.llm.weight_checksums()
    aliases = tied | {name: alias for alias, name in tied.items()}
    optional = {name for name, other in aliases.items() if other in baseline}
    names = sorted((current.keys() - optional) | baseline.keys())
    mismatches = [name for name in names if current.get(name) != baseline.get(name)]
    return body.reply(request, {"match": not mismatches, "mismatches": mismatches})


async def _checksums(serving: Serving, names: str | None) -> dict[str, Any]:
    """Checksums in memory, of the checkpoint, or both; with both, the checkpoint's may be null, with a reason."""
    reply: dict[str, Any] = {}
    if names != "checkpoint":
        reply["checksums"] = await serving.llm.weight_checksums()
    if names != "memory":
        try:
            reply |= await serving.llm.checkpoint_checksums()
        except Conflict as error:
            if names == "checkpoint":
                raise
            reply |= {"checkpoint": None, "reason": error.message}
    return reply


async def get_world_size(serving: Serving, request: Request) -> Response:
    """GET /get_world_size: the server's number of ranks in a weight transfer"""
    return body.reply(request, {"world_size": 1})


async def collective_rpc(serving: Serving, request: Request) -> Response:
    """POST /collective_rpc"""
    params = await read(serving, request, RpcBody)
    if params.timeout is not None and not 0 < params.timeout <= LONGEST_RPC:
        raise invalid("timeout", f"must be above 0 and at most {LONGEST_RPC:g} seconds")
    try:
        results = await serving.llm.collective_rpc(params.method, params.timeout, params.args, params.kwargs)
    except TimeoutError:
        raise EngineDead(f"{params.method} has not returned for {params.timeout:g} s", code="engine_hung") from None
    return body.reply(request, {"results": results})
