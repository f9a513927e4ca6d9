"""The sessions of a server with several API processes: their supervisor hosts the service, and each process asks it.

A ZeroMQ ROUTER and DEALERs, with msgpack.  A notice is applied in the order in which its process sent it, before the
calls that the process sends after it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tokserve.base.errors import BY_STATUS, QueueFull, RequestError, RequestFailed, Unavailable
from tokserve.config import Config
from tokserve.features.sessions.calls import AnyCall, AnyNotice, SessionCall, SessionNotice, make_service
from tokserve.features.sessions.options import SessionOptions

logger = logging.getLogger(__name__)
PATIENCE = 30.0  # seconds without an answer, beyond the seconds that a call waits
KINDS = BY_STATUS | {QueueFull.status: QueueFull}


class SessionMessage(msgspec.Struct, array_like=True):
    """What a process sends.  `number`: of a call, which its reply repeats; 0: of a notice."""

    number: int
    call: AnyCall | AnyNotice


class SessionError(msgspec.Struct, array_like=True):
    """A RequestError of a call."""

    status: int
    message: str
    field: str | None
    code: str | None
    retry_after: int | None


class SessionReply(msgspec.Struct, array_like=True):
    """The result of a call, packed, or its error."""

    number: int
    result: msgspec.Raw
    error: SessionError | None = None


class SessionHost:
    """Hosts the service at `address`, a socket in a private directory, until it is closed."""

    def __init__(self, config: Config) -> None:
        self._service = make_service(config)
        self._directory = tempfile.mkdtemp(prefix="tokserve-sessions-")
        self.address = f"ipc://{self._directory}/s"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(self.address)
        self._decoder = msgspec.msgpack.Decoder(SessionMessage)
        self._tasks: set[asyncio.Task[None]] = set()
        for work in (self._serve(), self._service.sweep()):
            self._keep(asyncio.get_running_loop().create_task(work))

    async def _serve(self) -> None:
        while True:
            identity, packed = await self._socket.recv_multipart()
            message = self._decoder.decode(packed)
            if isinstance(message.call, SessionNotice):
                message.call.apply(self._service)
            else:
                self._keep(asyncio.create_task(self._reply(identity, message.number, message.call)))

    async def _reply(self, identity: bytes, number: int, call: SessionCall) -> None:
        try:
            reply = SessionReply(number, msgspec.Raw(msgspec.msgpack.encode(await call.run(self._service))))
        except RequestError as error:
            sent = SessionError(error.status, error.message, error.field, error.code, error.retry_after)
            reply = SessionReply(number, msgspec.Raw(msgspec.msgpack.encode(None)), sent)
        with suppress(zmq.ZMQError):  # the process has ended
            await self._socket.send_multipart([identity, msgspec.msgpack.encode(reply)])

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the host of sessions failed", exc_info=error)

    async def close(self) -> None:
        """Stop, and remove the socket."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._service.files is not None:
            self._service.files.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


class RemoteSessions:
    """Runs calls on the service of a `SessionHost` at `address`."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(SessionReply)
        self._pending: dict[int, asyncio.Future[SessionReply]] = {}
        self._number = 0
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            reply = self._decoder.decode(await self._socket.recv())
            pending = self._pending.pop(reply.number, None)
            if pending is not None and not pending.done():
                pending.set_result(reply)

    async def call(self, call: SessionCall) -> Any:
        """The result of a call.  Raises RequestError."""
        self._number += 1
        number, pending = self._number, asyncio.get_running_loop().create_future()
        self._pending[number] = pending
        self._send(number, call)
        seconds = msgspec.to_builtins(call).get("wait", 0.0) + PATIENCE
        try:
            async with asyncio.timeout(seconds):
                reply: SessionReply = await pending
        except TimeoutError:
            raise Unavailable(
                "the process that keeps the sessions does not answer", code="sessions_unavailable"
            ) from None
        finally:
            self._pending.pop(number, None)
        if reply.error is not None:
            raise _error(reply.error)
        return msgspec.msgpack.decode(reply.result, type=call.result)

    def notify(self, notice: SessionNotice) -> None:
        """Tell the service; never waits."""
        self._send(0, notice)

    def _send(self, number: int, call: Any) -> None:
        self._socket.send(msgspec.msgpack.encode(SessionMessage(number, call)), zmq.NOBLOCK)

    async def close(self) -> None:
        """Disconnect; calls that wait are not answered."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close()
        self._context.term()


def _error(error: SessionError) -> RequestError:
    kind = KINDS.get(error.status, RequestFailed)
    raised = kind(error.message)
    raised.field, raised.code, raised.retry_after = error.field, error.code, error.retry_after
    return raised


def make_host(config: Config) -> SessionHost | None:
    """The host of a server with several API processes; None: it keeps no sessions."""
    return SessionHost(config) if config.options_of(SessionOptions).sessions else None
