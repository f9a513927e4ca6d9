"""The routes of weights that are more than one command: tensors in a body, checksums, what serves."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import Conflict, RequestError, invalid
from tokserve.client.async_llm import AsyncLLM
from tokserve.protocol.commands import RANDOM_SEED
from tokserve.server import reply_types as types
from tokserve.server.admin.commands import read_arguments
from tokserve.server.endpoint import COMMAND, Endpoint
from tokserve.server.http import body
from tokserve.server.http.disconnect import ClientDisconnected
from tokserve.server.serving import Serving

TENSORS = ("application/octet-stream", "application/safetensors", "application/x-safetensors")
PIECE = 4 << 20  # bytes of a weight body that go to the engine at a time
SLOW_PIECE = 1.0  # seconds after which a smaller piece goes, too
DRAIN_SECONDS = 60.0  # for the rest of a refused weight body
UNDER_WAY = 8  # limit of pieces sent and not yet acknowledged


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


class CheckerBody(msgspec.Struct, forbid_unknown_fields=True):
    """`action`: checksum, compare (with `baseline`), or reset to random weights.  `names`: memory, or checkpoint."""

    action: str
    baseline: dict[str, str] | None = None
    names: str | None = None


class WeightQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What a trainer wants to know beside version and epoch."""

    checksum: bool = False
    tensors: bool = False


async def update_weights(serving: Serving, request: Request) -> Response:
    """POST /update_weights: stage tensors of the open update, or a complete update from a directory"""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() in TENSORS:
        await _stream_weights(serving, request)
        return body.reply(request, {"message": "Weights updated"})
    params = await read_arguments(serving, request, UpdateBody)
    if (params.update_info is None) == (params.weight_dir is None):
        raise RequestError("give update_info (inside an update) or weight_dir (a complete one)", field="update_info")
    if params.weight_dir is not None:
        await serving.llm.update_weights(
            {
                "weight_dir": params.weight_dir,
                "weight_version": params.weight_version,
                "recompute_kv": params.recompute_kv,
                "take_over": params.take_over,
            }
        )
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
        return message.get("body", b"")

    async def pieces(self) -> AsyncIterator[tuple[bytes, bool]]:
        """Pieces of at least PIECE bytes, smaller ones if they come slowly: (bytes, whether they are the last).  Raises
        `ClientDisconnected`."""
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
    # several in flight: the engine acknowledges a piece only between two steps
    sent: deque[asyncio.Task[None]] = deque()
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


async def served_weights(serving: Serving, request: Request) -> Response:
    """GET /weight_info: the current weights; `checksum`: compute their checksum; `tensors`: list their tensors"""
    params = await read_arguments(serving, request, WeightQuery)
    return body.reply(request, await serving.llm.served_weights(checksum=params.checksum, tensors=params.tensors))


async def weight_checker(serving: Serving, request: Request) -> Response:
    """POST /weight_checker: checksums of the weights, or whether they equal a baseline; or reset to random ones"""
    params = await read_arguments(serving, request, CheckerBody)
    if params.action not in ("checksum", "compare", "reset"):
        raise invalid("action", f"must be checksum, compare or reset, got {params.action[:200]!r}")
    if params.action == "reset":
        await reset_weights(serving.llm)
        return body.reply(request, {"status": "reset"})
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


async def reset_weights(llm: AsyncLLM) -> None:
    """An update to random weights.  Trainers do this before a push, to see that it brings every tensor."""
    update_id = (await llm.start_weight_update())["update_id"]
    is_staged = False
    try:
        await llm.update_weights({"update_info": {RANDOM_SEED: secrets.randbits(31)}, "update_id": update_id})
        is_staged = True
    finally:
        if not is_staged:
            await llm.abort_weight_update(update_id)
    await llm.finish_weight_update(update_id=update_id)


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


ENDPOINTS = (
    Endpoint(
        ("GET",),
        "/weight_info",
        served_weights,
        reply=types.ServedWeights,
        guarded=True,
        raises=COMMAND,
        query=(("checksum", bool), ("tensors", bool)),
    ),
    Endpoint(
        ("POST",),
        "/update_weights",
        update_weights,
        UpdateBody,
        control=True,
        reply=types.Done,
    ),
    Endpoint(
        ("POST",),
        "/weight_checker",
        weight_checker,
        CheckerBody,
        control=True,
        reply=types.Checksums,
    ),
)
