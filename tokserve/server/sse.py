"""Server-sent events, and the same for a reply that is not streamed: deltas until the end, an error or a disconnect.

When the client disconnects, the request's own task is cancelled and the generation closed, which aborts it in the engine.
Must not know what the events say: a `Renderer` makes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokserve.client.outputs import ChoiceOutput
from tokserve.errors import RequestError, RequestFailed
from tokserve.server import body, errors, workers
from tokserve.server.generation import Generation
from tokserve.server.holes import FilledReply, Holes
from tokserve.server.watch import Gone, Watch

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
WRITE = "tokserve.write"  # the key of a `Write` in the scope, if the server offers one
OWN_FAULT = ("forbidden", "grammar_limit")  # stop details of errors that the request's parameters cause
LARGE = 1 << 15  # bytes of logprobs, whose objects take milliseconds
PATIENCE = 0.25  # seconds that a client may leave its connection full before no more tokens are made for it
KEEP_ALIVE = b": keep-alive\n\n"

Close = Callable[[RequestError | None], bytes]  # the last events of a stream, with the error that it ends in
Write = Callable[[bytes], bool]  # sends part of a body at once; False: it could not, use `send`


def event(json: bytes) -> bytes:
    """One event."""
    return b"data: " + json + b"\n\n"


def ended(error: RequestError | None) -> bytes:
    """How most streams end: with the error, if there is one, and [DONE]."""
    return (event(errors.body(error)) if error else b"") + DONE


class Renderer(Protocol):
    """Makes the bytes of events."""

    def delta(self, delta: ChoiceOutput) -> bytes:
        """The events of one delta; may be empty."""

    def tail(self) -> bytes:
        """What comes after the last delta, before the end."""


async def answer(
    generation: Generation,
    request: Request,
    render: Callable[[list[ChoiceOutput], Holes | None], Any],
    headers: dict[str, str],
) -> Response:
    """What `render` makes of all choices, as the reply; a long one is made in a thread, and while it is sent.  Raises
    as `collect`."""
    done = await collect(generation, request)
    size = sum(map(_columns_size, done))
    if size < LARGE:
        return body.reply(request, render(done, None), headers)
    if body.wants_msgpack(request):
        return await workers.run(size, lambda: body.reply(request, render(done, None), headers))
    holes = Holes()
    json = await workers.run(size, lambda: body.encode_json(render(done, holes)))
    return FilledReply(holes.filled(json), headers)


def _columns_size(completion: ChoiceOutput) -> int:
    """Bytes of the logprobs."""
    both = (completion.logprobs, completion.prompt_logprobs)
    return sum(len(columns.token_logprobs) + len(columns.top_logprobs) for columns in both if columns is not None)


async def collect(generation: Generation, request: Request) -> list[ChoiceOutput]:
    """All choices in order.  Raises `Gone` if the client disconnects, `failure`'s error if every choice failed."""
    done: list[ChoiceOutput] = []
    ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def take() -> None:
        try:
            done.extend(generation.take())
            if generation.ended and not ended.done():
                ended.set_result(None)
        except Exception as error:
            if not ended.done():
                ended.set_result(error)

    try:
        async with Watch(request.receive):
            generation.listen(take)
            if error := await ended:
                raise error
    except RequestError:
        generation.cause = "error"
        raise
    finally:
        await generation.close()
    if failed := failure(done):
        raise generation.rename(failed)
    return sorted(done, key=_index)


def _index(completion: ChoiceOutput) -> int:
    return completion.index


def failure(ends: list[ChoiceOutput]) -> RequestError | None:
    """The error of a request if every choice ended in one: 400 if its parameters are to blame, else 500."""
    if ends and all(end.finish_reason == "error" for end in ends):
        if all(end.stop_detail in OWN_FAULT for end in ends):
            field = "structured_outputs" if ends[0].stop_detail == "grammar_limit" else None
            return RequestError(ends[0].message or "", field=field)
        return RequestFailed(ends[0].message or "the engine could not serve this request")
    return None


class EventStream(Response):
    """The deltas of a generation as server-sent events.  `opening`: what is written at once, before there are any."""

    def __init__(
        self, generation: Generation, renderer: Renderer, keep_alive: float, headers: Mapping[str, str], *,
        opening: bytes = b"", close: Close = ended,
    ) -> None:  # fmt: skip
        self.background = None
        self.status_code = 200
        self._generation = generation
        self._renderer = renderer
        self._opening = opening
        self._close = close
        self._interval = keep_alive
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = _Pump(
            self._generation, self._renderer, self._close, _Wire(send, self._interval, scope.get(WRITE, _cannot))
        )
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with Watch(receive):
                await pump.run(self._opening)
        except Gone:
            pass
        finally:
            pump.stop()
            await self._generation.close()


def _cannot(events: bytes) -> bool:
    return False


class _Pump:
    """Writes a generation's deltas in the very call that announces them: a token wakes no task.

    While the connection is blocked nothing is taken from the generation, which merges what comes.
    """

    def __init__(self, generation: Generation, renderer: Renderer, close: Close, wire: _Wire) -> None:
        self._generation = generation
        self._renderer = renderer
        self._close = close
        self._events = generation.timed(renderer.delta)
        self._wire = wire
        self._ends: list[ChoiceOutput] = []
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    async def run(self, opening: bytes) -> None:
        """Write from the `opening` until the response has ended."""
        self._wire.start(self._write, self._generation.stall)
        if opening:
            self._wire.write(opening)
        self._generation.listen(self._write)
        await self._wire.end(await self._last_events())

    def stop(self) -> None:
        """Write nothing more."""
        self._ended.cancel()
        self._wire.stop()

    def _write(self) -> None:
        """Write all deltas available now, at once; from `LARGE` of them on, a thread makes the events."""
        if self._wire.blocked or self._ended.done():
            return
        generation = self._generation
        try:
            events, size = b"", 0
            for delta in generation.take():
                if delta.finish_reason is not None:
                    self._ends.append(delta)
                size += _columns_size(delta)
                if size >= LARGE:
                    self._wire.write_later(events, self._large_events(delta))
                    return
                events += self._events(delta)
            if events:
                self._wire.write(events)
            if self._ends and generation.ended:
                self._ended.set_result(None)
        except Exception as error:
            self._ended.set_result(error)

    async def _large_events(self, delta: ChoiceOutput) -> bytes:
        """The events of a delta with many logprobs, such as those of a long prompt, made in a thread."""
        try:
            return await workers.run(_columns_size(delta), lambda: self._events(delta))
        except Exception as error:
            if not self._ended.done():
                self._ended.set_result(error)
            return b""

    async def _last_events(self) -> bytes:
        """What comes after the last delta: the renderer's tail, or an error."""
        try:
            if error := await self._ended:
                raise error
            failed = failure(self._ends)
            return self._renderer.tail() + self._close(failed and self._generation.rename(failed))
        except RequestError as error:
            self._generation.cause = "error"
            return self._close(error)
        except Exception:
            self._generation.cause = "error"
            logger.exception("a stream failed")
            return self._close(RequestFailed("internal error"))


class _Wire:
    """The connection of one stream; sends a comment after `interval` seconds without events.

    A connection that has been blocked for `PATIENCE` seconds is stalled, and no tokens are made for it: its client does
    not read, or its events take longer to make than its tokens, and what it is owed would only fill the memory.
    """

    def __init__(self, send: Send, interval: float, write: Write = _cannot) -> None:
        self._send = send
        self._write = write
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._rest: asyncio.Task[None] | None = None
        self._on_free: Callable[[], None]
        self._on_stall: Callable[[bool], None]
        self._patience: asyncio.TimerHandle | None = None
        self._stalled = False
        self.blocked = False

    def start(self, on_free: Callable[[], None], on_stall: Callable[[bool], None]) -> None:
        """Start the timer for comments.  `on_free` is called when the connection is no longer blocked, `on_stall` when
        it is stalled (True) and when it is not any more (False)."""
        self._on_free, self._on_stall = on_free, on_stall
        self._timer = self._loop.call_later(self._interval, self._tick)

    def stop(self) -> None:
        """Stop the timers, and cancel a blocked write."""
        for timer in (self._timer, self._patience):
            if timer:
                timer.cancel()
        if self._rest:
            self._rest.cancel()

    def write(self, events: bytes) -> None:
        """Send events.  If the client reads too slowly, `send` has to wait, and the connection is blocked meanwhile."""
        self._last = self._loop.time()
        if self._write(events):
            return
        sending = self._send({"type": "http.response.body", "body": events, "more_body": True}).__await__()
        try:
            waits_for = next(sending)  # a task's first step; most sends are complete after it, and need no task
        except StopIteration:
            return
        self._block(_Begun(waits_for, sending))

    def write_later(self, events: bytes, making: Coroutine[Any, Any, bytes]) -> None:
        """Send events and those that are being made; until then, the connection is blocked."""
        self._block(self._make(events, making))

    def _block(self, sending: Awaitable[None]) -> None:
        self.blocked = True
        self._patience = self._loop.call_later(PATIENCE, self._stall)
        self._rest = self._loop.create_task(self._finish(sending))

    async def _make(self, events: bytes, making: Coroutine[Any, Any, bytes]) -> None:
        await self._send({"type": "http.response.body", "body": events + await making, "more_body": True})

    async def _finish(self, sending: Awaitable[None]) -> None:
        try:
            await sending
        finally:
            self.blocked = False
            self._last = self._loop.time()
            if self._patience:
                self._patience.cancel()
            if self._stalled:
                self._stalled = False
                self._on_stall(False)
            self._on_free()

    def _stall(self) -> None:
        self._stalled = True
        self._on_stall(True)

    async def end(self, events: bytes) -> None:
        """Send the last events and end the response."""
        if self._timer:
            self._timer.cancel()
        if self._rest:
            await self._rest
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def _tick(self) -> None:
        silence = self._loop.time() - self._last
        if silence >= self._interval:
            if not self.blocked:
                self.write(KEEP_ALIVE)
            silence = 0.0
        self._timer = self._loop.call_later(self._interval - silence, self._tick)


class _Begun:
    """An awaitable whose first step was taken already: what it waits for, and the rest of it."""

    def __init__(self, waits_for: Any, rest: Generator[Any, Any, Any]) -> None:
        self._waits_for = waits_for
        self._rest = rest

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._waits_for
        return (yield from self._rest)
