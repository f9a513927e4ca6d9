"""The calls of a weight update over HTTP, without the tensors.  docs/rl.md describes the routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from .connection import Connection
from .errors import ServerError
from .pools import NOT_SENT

START, PUT, FINISH, ABORT = "/start_weight_update", "/update_weights", "/finish_weight_update", "/abort_weight_update"
INIT, SHUTDOWN, INFO = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/weight_info"
TENSORS = {"Content-Type": "application/octet-stream"}


class WeightRoutes:
    """The routes of one server.  `handle` of its methods: {"update_id"} of the update that is meant, or nothing."""

    not_opened = (ServerError, *NOT_SENT)  # errors of `start` after which no update of ours is open
    failures: tuple[type[Exception], ...] = (ServerError, httpx.TransportError)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def refusal(self, error: Exception) -> tuple[str | None, str]:
        return (error.code, error.message) if isinstance(error, ServerError) else (None, str(error))

    async def served_weights(self, *, checksum: bool = False, tensors: bool = False) -> dict[str, Any]:
        """GET /weight_info."""
        flags = [name for name, value in (("checksum", checksum), ("tensors", tensors)) if value]
        return await self._connection.get(f"{INFO}?" + "&".join(f"{name}=true" for name in flags))

    async def init(self, options: dict[str, Any]) -> None:
        """Have the server meet this process in a process group."""
        await self._connection.open("update", INIT, {"init_info": options})

    async def shutdown(self) -> None:
        """Have the server leave the process group."""
        await self._connection.post(SHUTDOWN)

    async def start(self, base: dict[str, Any]) -> dict[str, Any]:
        return await self._connection.open("update", START, base)

    async def put_file(self, pieces: AsyncIterator[bytes], handle: dict[str, Any]) -> None:
        path = f"{PUT}?update_id={handle['update_id']}" if handle else PUT
        await self._connection.send("POST", path, content=pieces, headers=TENSORS)

    async def announce(self, tensors: dict[str, Any], handle: dict[str, Any]) -> None:
        """Say which tensors come over the process group; returns when the server has received them."""
        await self._connection.post(PUT, {"update_info": tensors} | handle)

    async def finish(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._connection.post(FINISH, body)

    async def abort(self, handle: dict[str, Any]) -> None:
        await self._connection.post(ABORT, handle)

    async def load_dir(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._connection.open("update", PUT, body)
