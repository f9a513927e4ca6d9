"""The sessions of a server with several API processes: their supervisor hosts the service, and each process asks it.

A ZeroMQ ROUTER and DEALERs, with msgpack.  A notice is applied in the order in which its process sent it, before the
calls that the process sends after it.  The identity of a socket begins with the index of its process.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tokserve.base.errors import BY_STATUS, QueueFull, RequestError, RequestFailed, Unavailable
from tokserve.config import Config
from tokserve.features.sessions.calls import (
    AnyCall,
    AnyNotice,
    BeginRequest,
    EndRequest,
    SessionCall,
    SessionNotice,
    make_service,
)
from tokserve.features.sessions.options import SessionOptions

logger = logging.getLogger(__name__)
PATIENCE = 30.0  # seconds without an answer, beyond the seconds that a call waits
KINDS = BY_STATUS | {QueueFull.status: QueueFull}


class SessionMessage(msgspec.Struct, array_like=True):
    """What a process sends.  `number`: of a call, which its reply repeats; 0: of a notice.  `call`: None: the call with
    this number is of no use any more."""

    number: int
    call: AnyCall | AnyNotice | None


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
        self._calls: dict[tuple[bytes, int], asyncio.Task[None]] = {}  # by the identity and the number
        self._running: dict[bytes, dict[str, EndRequest]] = {}  # how requests end, by the identity and the request's id
        for work in (self._serve(), self._service.sweep()):
            self._keep(asyncio.get_running_loop().create_task(work))

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            identity, packed = await self._socket.recv_multipart()
            loop.call_soon(self._take, identity, packed)  # the loop logs what one raises

    def _take(self, identity: bytes, packed: bytes) -> None:
        message = self._decoder.decode(packed)
        call, key = message.call, (identity, message.number)
        if call is None:
            if task := self._calls.get(key):
                task.cancel()
        elif isinstance(call, SessionCall):
            self._calls[key] = task = asyncio.create_task(self._answer(identity, message.number, call))
            task.add_done_callback(lambda done: self._end_call(key, done))
        else:
            self._note(identity, call)
            call.apply(self._service)

    def _note(self, identity: bytes, notice: SessionNotice) -> None:
        running = self._running.setdefault(identity, {})
        if isinstance(notice, BeginRequest):
            running[notice.request_id] = EndRequest(notice.owner, notice.session_id, notice.request_id)
        elif isinstance(notice, EndRequest):
            running.pop(notice.request_id, None)

    def on_process_end(self, index: int) -> None:
        """An API process has ended: so have its requests and its calls."""
        prefix = _prefix(index)
        for key, task in self._calls.items():
            if key[0].startswith(prefix):
                task.cancel()
        for identity in [one for one in self._running if one.startswith(prefix)]:
            for notice in self._running.pop(identity).values():
                notice.apply(self._service)

    async def _answer(self, identity: bytes, number: int, call: SessionCall) -> None:
        try:
            reply = SessionReply(number, msgspec.Raw(msgspec.msgpack.encode(await call.run(self._service))))
        except RequestError as error:
            reply = _refusal(number, error)
        await self._send(identity, reply)

    def _end_call(self, key: tuple[bytes, int], task: asyncio.Task[None]) -> None:
        del self._calls[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a call of the host of sessions failed", exc_info=error)
            failure = RequestFailed("the process that keeps the sessions could not answer")
            self._keep(asyncio.create_task(self._send(key[0], _refusal(key[1], failure))))

    async def _send(self, identity: bytes, reply: SessionReply) -> None:
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
        tasks = [*self._tasks, *self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._service.files is not None:
            self._service.files.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


class RemoteSessions:
    """Runs calls on the service of a `SessionHost` at `address`.  `index`: of this process."""

    def __init__(self, address: str, index: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, _prefix(index) + secrets.token_bytes(8))
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
        seconds = call.longest_wait() + PATIENCE
        try:
            async with asyncio.timeout(seconds):
                reply: SessionReply = await pending
        except TimeoutError:
            self._send(number, None)
            raise Unavailable(
                "the process that keeps the sessions does not answer", code="sessions_unavailable"
            ) from None
        except asyncio.CancelledError:
            self._send(number, None)
            raise
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


def _prefix(index: int) -> bytes:
    return b"%d." % index


def _refusal(number: int, error: RequestError) -> SessionReply:
    sent = SessionError(error.status, error.message, error.field, error.code, error.retry_after)
    return SessionReply(number, msgspec.Raw(msgspec.msgpack.encode(None)), sent)


def _error(error: SessionError) -> RequestError:
    kind = KINDS.get(error.status, RequestFailed)
    raised = kind(error.message)
    raised.field, raised.code, raised.retry_after = error.field, error.code, error.retry_after
    return raised


def make_host(config: Config) -> SessionHost | None:
    """The host of a server with several API processes; None: it keeps no sessions."""
    return SessionHost(config) if config.options_of(SessionOptions).sessions else None
