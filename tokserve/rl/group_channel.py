"""The trainer's end of weight updates: HTTP, and a process group for the tensors once it has been joined."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from . import broadcast
from .broadcast import TransferGroup
from .connection import Connection
from .errors import TransferError, WeightsError
from .weight_routes import WeightRoutes

LAST_WAIT = 1.0  # seconds for rank 0 to give its port up after the server has refused to join


class GroupChannel(WeightRoutes):
    """The calls of updates, and the process group that tensors go over once it has been joined."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._group: TransferGroup | None = None

    @property
    def has_group(self) -> bool:
        """Whether `join` has formed a process group."""
        return self._group is not None

    @property
    def sends_on_device(self) -> bool:
        """Whether tensors go over the group, which takes them from where they are."""
        return self.has_group

    async def join(
        self, backend: str, address: str, port: int, *, rank_offset: int, world_size: int, timeout: float
    ) -> None:
        """Form a process group with the server, this process as rank 0."""
        options = {
            "backend": backend,
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "rendezvous": "tokserve",
        }
        interrupted = threading.Event()
        meeting = asyncio.ensure_future(
            _in_thread(lambda: TransferGroup(backend, address, port, 0, world_size, timeout, interrupted))
        )
        try:
            self._group, _ = await asyncio.gather(meeting, self.init(options))
        finally:
            if self._group is None:  # the server does not join: the port is to be free for the next try
                interrupted.set()
                await asyncio.wait([meeting], timeout=LAST_WAIT)
                meeting.add_done_callback(_retrieve)

    async def leave(self) -> None:
        """Close the process group at both ends."""
        if self._group is not None:
            self.close()
            await self.shutdown()

    def close(self) -> None:
        """Close this end of the process group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    async def broadcast(
        self, announced: dict[str, Any], tensors: list[Tensor], *, packed: bool, handle: dict[str, Any]
    ) -> None:
        """Announce tensors to the server and send them over the group."""
        group = self._group
        if group is None:
            raise TransferError("there is no process group: join one first")
        sending = asyncio.ensure_future(asyncio.to_thread(broadcast.send, group, tensors, packed=packed))
        received = False
        try:
            await self.announce(announced, handle)
            received = True
        finally:
            if not received:  # the server does not receive any more: interrupt the sending thread
                group.interrupt()
                self._group = None
                await asyncio.wait([sending])
                sending.exception()  # retrieved, or asyncio logs it
        await sending


def _retrieve(meeting: asyncio.Future[TransferGroup]) -> None:
    """Take the error, or asyncio logs it; a group that was formed is closed."""
    if not meeting.cancelled() and meeting.exception() is None:
        meeting.result().close()


async def _in_thread(form: Callable[[], TransferGroup]) -> TransferGroup:
    """`form()` in a daemon thread, which does not keep the program from ending if the caller gives up."""
    formed: Future[TransferGroup] = Future()

    def run() -> None:
        try:
            formed.set_result(form())
        except WeightsError as error:
            formed.set_exception(error)
        finally:
            if not formed.done():  # the thread prints the traceback
                formed.set_exception(TransferError("the process group could not be formed"))

    formed.set_running_or_notify_cancel()  # it cannot be cancelled
    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(formed)
