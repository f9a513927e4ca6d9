"""Server-sent events and their non-stream twin: pulls deltas until the end, the client's leaving or an error.

One task per request watches the connection: when the client leaves, the pulling is cancelled and the flight
closed, which aborts it in the engine.  What the events say is decided by a `Renderer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokserve.client.outputs import Completion
from tokserve.errors import RequestError, RequestFailed
from tokserve.server import errors
from tokserve.server.body import Gone
from tokserve.server.flights import Flight

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(json: bytes) -> bytes:
    """One event."""
    return b"data: " + json + b"\n\n"


class Renderer(Protocol):
    """Makes the bytes of events."""

    def delta(self, delta: Completion) -> bytes:
        """The events of one delta; may be empty."""

    def tail(self) -> bytes:
        """What comes after the last delta, before [DONE]."""


class Watch:
    """`async with Watch(receive): ...` cancels its body when the client leaves, and then raises `Gone`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watcher.cancel()
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise Gone


async def collect(flight: Flight, request: Request) -> list[Completion]:
    """All choices in order.  Raises `Gone` if the client leaves, `RequestFailed` if no choice came to an end."""
    done: list[Completion] = []
    try:
        async with Watch(request.receive):
            async for completion in flight.deltas():
                done.append(flight.take(completion))
    except RequestError:
        flight.cause = "error"
        raise
    finally:
        await flight.close()
    if failed := failure(done):
        raise failed
    return sorted(done, key=_index)


def _index(completion: Completion) -> int:
    return completion.index


def failure(ends: list[Completion]) -> RequestFailed | None:
    """The error of a request all of whose choices ended in one."""
    if ends and all(end.finish_reason == "error" for end in ends):
        return RequestFailed(ends[0].message or "the engine could not serve this request")
    return None


class EventStream(Response):
    """The deltas of a flight as server-sent events."""

    def __init__(self, flight: Flight, renderer: Renderer, keep_alive: float, headers: Mapping[str, str]) -> None:
        self.background = None
        self.status_code = 200
        self._flight = flight
        self._renderer = renderer
        self._interval = keep_alive
        self._ends: list[Completion] = []
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = _Wire(send, self._interval)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            wire.start()
            async with Watch(receive):
                await wire.end(await self._pump(wire) + DONE)
        except Gone:
            pass
        finally:
            wire.stop()
            await self._flight.close()

    async def _pump(self, wire: _Wire) -> bytes:
        """Write all deltas; returns what is left to say."""
        flight = self._flight
        deltas = flight.deltas()
        several = flight.num_choices > 1
        try:
            async for delta in deltas:
                events = self._events(delta)
                while several and (more := _ready(deltas)):
                    events += self._events(more)
                if events:
                    await wire.write(events)
            tail = self._renderer.tail()
            failed = failure(self._ends)
            return tail + event(errors.body(failed)) if failed else tail
        except RequestError as error:
            flight.cause = "error"
            return event(errors.body(error))
        except Exception:
            flight.cause = "error"
            logger.exception("a stream failed")
            return event(errors.body(RequestFailed("internal error")))

    def _events(self, delta: Completion) -> bytes:
        delta = self._flight.take(delta)
        if delta.finish_reason is not None:
            self._ends.append(delta)
        return self._renderer.delta(delta)


def _ready(deltas: AsyncIterator[Completion]) -> Completion | None:
    """The next delta if there is one now.  (One choice's deltas are merged by the client until they are fetched.)"""
    step = anext(deltas).__await__()
    try:
        next(step)
    except StopIteration as arrived:
        delta: Completion = arrived.value
        return delta
    except StopAsyncIteration:
        return None  # the loop will see it again
    step.close()  # it waits; a cancelled wait loses nothing
    return None


class _Wire:
    """The connection of one stream; says so when there was nothing to say for `interval` seconds."""

    def __init__(self, send: Send, interval: float) -> None:
        self._send = send
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._busy = self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch for silence."""
        self._timer = self._loop.call_later(self._interval, self._tick)

    def stop(self) -> None:
        """No more comments."""
        self._ended = True
        if self._timer:
            self._timer.cancel()

    async def write(self, events: bytes) -> None:
        """Send events; waits while the client reads slower than they come."""
        self._busy = True
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._busy = False
        self._last = self._loop.time()

    async def end(self, events: bytes) -> None:
        """Send the last events and end the response."""
        self.stop()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def _tick(self) -> None:
        silence = self._loop.time() - self._last
        if silence >= self._interval:
            self._comment = self._loop.create_task(self._say_something())
            silence = 0.0
        self._timer = self._loop.call_later(self._interval - silence, self._tick)

    async def _say_something(self) -> None:
        if not (self._ended or self._busy):
            await self.write(KEEP_ALIVE)
