"""Pushes of tensors to this process's engine: `tokserve.rl`'s, which keep what was pushed and send deltas of it.

torch is loaded by the first one, as its caller has.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

from tokserve.base.errors import EngineDead, RequestError
from tokserve.client.admin import AdminMethods


class EngineChannel:
    """The calls of an update, as `tokserve.rl.pusher.WeightChannel` has them."""

    failures = (RequestError, EngineDead)
    not_opened = (RequestError, EngineDead)
    has_group = sends_on_device = False

    def __init__(self, engine: AdminMethods) -> None:
        self._engine = engine

    def refusal(self, error: Exception) -> tuple[str | None, str]:
        return (error.code, error.message) if isinstance(error, RequestError) else (None, str(error))

    async def served_weights(self, *, checksum: bool = False, tensors: bool = False) -> dict[str, Any]:
        return await self._engine.served_weights(checksum=checksum, tensors=tensors)

    async def start(self, base: dict[str, Any]) -> dict[str, Any]:
        return await self._engine.start_weight_update(**base)

    async def put_file(self, pieces: AsyncIterator[bytes], handle: dict[str, Any]) -> None:
        stream = secrets.token_hex(8)
        await self._engine.begin_weight_stream(stream, **handle)
        async for piece in pieces:
            await self._engine.feed_weights(stream, piece)
        await self._engine.feed_weights(stream, b"", last=True)

    async def finish(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._engine.finish_weight_update(**body)

    async def abort(self, handle: dict[str, Any]) -> None:
        await self._engine.abort_weight_update(**handle)

    async def load_dir(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._engine.load_weights(
            body["weight_dir"], body["weight_version"], recompute_kv=body.get("recompute_kv", False)
        )

    async def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """There is no process group here."""
        raise RequestError("tensors of this process need no process group")


class WeightPushes:
    """The pushes to one engine; remembers what was pushed with `delta`."""

    def __init__(self, engine: AdminMethods) -> None:
        self._pusher: Any = None
        self._adapters: Any = None
        self._engine = engine

    async def push(self, weights: Any, version: str | None, **options: Any) -> Any:
        """Push weights; the arguments are those of `tokserve.rl.pusher.Pusher.push`."""
        if self._pusher is None:
            self._pusher = importlib.import_module("tokserve.rl.pusher").Pusher(EngineChannel(self._engine))
        return await self._pusher.push(weights, version, **options)

    async def push_adapter(self, adapter: Any, name: str | None, version: str | None, **options: Any) -> Any:
        """Push an adapter; the arguments are those of `tokserve.rl.adapter_push.AdapterPusher.push`."""
        if self._adapters is None:
            pushes = importlib.import_module("tokserve.rl.adapter_push")
            self._adapters = pushes.AdapterPusher(EngineChannel(self._engine))
        return await self._adapters.push(adapter, name, version, **options)
