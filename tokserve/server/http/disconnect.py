"""Cancels the work for a request when its client disconnects."""

from __future__ import annotations

import asyncio

from starlette.types import Receive


class ClientDisconnected(Exception):
    """The client has disconnected: a response would not be read."""


class CancelOnDisconnect:
    """`async with CancelOnDisconnect(receive): ...` cancels its body when the client disconnects, and raises
    `ClientDisconnected`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._disconnected = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        watcher, task = self._watcher, self._task
        del self._watcher, self._task  # the frames of a cancelled task refer to this: a cycle, for every request
        watcher.cancel()
        if self._disconnected and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientDisconnected
