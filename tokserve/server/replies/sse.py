"""Sends the reply of a generation: as server-sent events, or collected into one body.

When the client disconnects, the request's task is cancelled and the generation closed, which aborts it in the engine.
The bytes of the events come from a `Renderer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokserve.base.errors import Overloaded, RequestError, RequestFailed
from tokserve.client.outputs import ChoiceOutput
from tokserve.server.generation import Generation
from tokserve.server.http import body, errors, workers
from tokserve.server.http.disconnect import CancelOnDisconnect, ClientDisconnected
from tokserve.server.http.protocol import STALLED, WRITE
from tokserve.server.replies.reply_parts import DeferredParts, PartedResponse

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
CLIENT_FAULTS = ("forbidden", "grammar_limit")  # stop details of errors caused by the request's parameters
NOT_THE_CLIENTS = ("abort_pause", "abort_quarantine", "shutdown")  # ends that the client has not caused
LARGE = 1 << 14  # bytes of columns that take milliseconds to render
PARTED = 1 << 16  # bytes of the columns of a whole reply that is sent while it is rendered
REPEATED = 1 << 21  # bytes of a stream's columns that take milliseconds to render if the last events repeat them
PATIENCE = 0.25  # seconds of a blocked connection after which the request is stalled
KEEP_ALIVE = b": keep-alive\n\n"
# no proxy keeps events until the stream ends (nginx, and others that know its header), no cache stores them
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
# separators of lines by Unicode, which clients take for ends of lines and SSE does not: as JSON escapes
SEPARATORS = tuple((c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029")

Close = Callable[[RequestError | None], bytes]  # makes the last events of a stream; the error is what ended it
Write = Callable[[bytes], bool]  # sends part of a body without waiting; False: not sent, use `send`


def check_format(stream: bool | None, packed: bool) -> None:
    """Raise `RequestError` for a stream to a client that accepts msgpack."""
    if stream and packed:
        raise RequestError("a stream is server-sent events with JSON; msgpack needs stream: false", field="stream")


def escape_separators(events: bytes) -> bytes:
    """Events whose lines are the same to every client.  Outside of strings of JSON no separator can stand."""
    if not events.isascii():
        for character, escape in SEPARATORS:
            events = events.replace(character, escape)
    return events


def event(json: bytes) -> bytes:
    return b"data: " + json + b"\n\n"


def final_events(error: RequestError | None) -> bytes:
    """The last events of most streams: the error, if there is one, and [DONE]."""
    return (event(errors.body(error)) if error else b"") + DONE


class Renderer(Protocol):
    """Makes the bytes of events."""

    def delta(self, delta: ChoiceOutput) -> bytes:
        """The events of one delta; may be empty."""

    def tail(self) -> bytes:
        """The events between the last delta and the last events."""


class ReplyRenderer(Renderer, Protocol):
    """Makes whole replies, too."""

    def reply(self, choices: list[ChoiceOutput], parts: DeferredParts | None, /) -> Any:
        """The reply with all choices; with `parts`, some of its values are encoded later."""


async def respond(
    generation: Generation,
    request: Request,
    renderer: ReplyRenderer,
    headers: Mapping[str, str],
    *,
    opening: Callable[[], bytes] = bytes,
    close: Close = final_events,
) -> Response:
    """The events of a stream (`opening`, `close`: see `EventStream`), or the reply with all choices; a large one is
    made in a thread, in parts, while it is sent.  `headers`: besides the request's id.  Raises as `collect`."""
    headers = {"X-Request-Id": generation.request_id, **headers}
    if generation.is_stream:
        return EventStream(generation, renderer, headers, opening=opening(), close=close)
    choices = await collect(generation, request)
    columns = sum(map(columns_size, choices))
    size = columns * (workers.SMALL // LARGE) + workers.ITEM * len(choices)
    if columns < PARTED or body.wants_msgpack(request):
        return await workers.off_loop(
            request, size, lambda: body.reply(request, renderer.reply(choices, None), headers)
        )
    parts = DeferredParts()
    json = await workers.run(size, lambda: body.encode_json(renderer.reply(choices, parts)))
    return PartedResponse(parts.encode(json), headers)


def columns_size(completion: ChoiceOutput) -> int:
    """The bytes of the values of tokens, which are most of a large reply."""
    if not (completion.columns or completion.values):
        return 0
    size = sum([column.num_bytes for column in completion.columns.values()])
    scores = completion.prompt_logprobs
    return size if scores is None else size + scores.num_bytes


async def collect(generation: Generation, request: Request) -> list[ChoiceOutput]:
    """All choices in order.  Raises `ClientDisconnected`, and `request_failure`'s error if every choice failed."""
    choices: list[ChoiceOutput] = []
    finished: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def take() -> None:
        try:
            choices.extend(generation.take())
            if generation.ended and not finished.done():
                finished.set_result(None)
        except Exception as error:
            if not finished.done():
                finished.set_result(error)

    try:
        async with CancelOnDisconnect(request.receive):
            generation.listen(take)
            if error := await finished:
                raise error
    except RequestError:
        generation.cause = "error"
        raise
    finally:
        await generation.close()
    if failed := request_failure(choices):
        raise generation.rename(failed)
    return sorted(choices, key=_index)


def _index(completion: ChoiceOutput) -> int:
    return completion.index


def request_failure(ends: list[ChoiceOutput]) -> RequestError | None:
    """The error of a request of which every choice failed: 400 if its parameters caused that, else 500."""
    if ends and all(end.finish_reason == "error" for end in ends):
        if all(end.stop_detail in CLIENT_FAULTS for end in ends):
            field = "structured_outputs" if ends[0].stop_detail == "grammar_limit" else None
            return RequestError(ends[0].message or "", field=field)
        return RequestFailed(ends[0].message or "the engine could not serve this request")
    return None


def unfinished(end: ChoiceOutput, message: str) -> RequestError:
    """The error of a request that ended without what its reply has; it may be sent again unless its client ended it."""
    kind = Overloaded if end.stop_detail in NOT_THE_CLIENTS else RequestError
    return kind(f"{message} ({end.stop_detail})", code=end.stop_detail)


class EventStream(Response):
    """The deltas of a generation as server-sent events.  `opening`: events to send before the first delta; `close`
    makes the last ones."""

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        headers: Mapping[str, str],
        *,
        opening: bytes = b"",
        close: Close = final_events,
    ) -> None:
        self.background = None
        self.status_code = 200
        self._generation = generation
        self._renderer = renderer
        self._opening = opening
        self._close = close
        self.init_headers({**HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = _Pump(
            self._generation,
            self._renderer,
            self._close,
            StreamWriter(send, self._generation.keep_alive, scope.get(WRITE, _never_write)),
        )
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with CancelOnDisconnect(receive):
                await pump.run(self._opening)
        except ClientDisconnected:
            if scope.get(STALLED):
                self._generation.cause = "abort_stalled"
        finally:
            pump.stop()
            await self._generation.close()


def _never_write(events: bytes) -> bool:
    return False


def _ignore(*_: object) -> None:
    """What a stopped writer calls: not the pump, which holds it."""


class _Pump:
    """Writes a generation's deltas in the call that announces them, so that a token wakes no task.

    While the connection is blocked, deltas stay in the generation, which merges them.
    """

    def __init__(self, generation: Generation, renderer: Renderer, close: Close, writer: StreamWriter) -> None:
        self._generation = generation
        self._renderer = renderer
        self._close = close
        self._events = generation.timed(renderer.delta)
        self._writer = writer
        self._ends: list[ChoiceOutput] = []
        self._size = 0  # bytes of all logprobs so far
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    async def run(self, opening: bytes) -> None:
        """Write from the `opening` until the response has ended."""
        self._writer.start(self._write, self._generation.stall)
        if opening:
            self._writer.write(opening)
        self._generation.listen(self._write)
        await self._writer.end(await self._last_events())

    def stop(self) -> None:
        self._ended.cancel()
        self._writer.stop()

    def _write(self) -> None:
        """Write all deltas available now; those with `LARGE` logprobs are rendered in a thread."""
        if self._writer.blocked or self._ended.done():
            return
        generation = self._generation
        try:
            events, size = b"", 0
            for delta in generation.take():
                columns = columns_size(delta)
                size += columns
                self._size += columns
                if delta.finish_reason is not None:
                    self._ends.append(delta)
                if size >= LARGE or (delta.finish_reason is not None and self._size >= REPEATED):
                    self._writer.write_later(events, self._large_events(delta))
                    return
                events += self._events(delta)
            if events:
                self._writer.write(events)
            if self._ends and generation.ended:
                self._ended.set_result(None)
        except Exception as error:
            self._ended.set_result(error)

    async def _large_events(self, delta: ChoiceOutput) -> bytes:
        """Render a delta with many logprobs, such as those of a long prompt, in a thread."""
        try:
            return await workers.run(columns_size(delta), lambda: self._events(delta))
        except Exception as error:
            if not self._ended.done():
                self._ended.set_result(error)
            return b""

    async def _last_events(self) -> bytes:
        """The events after the last delta: the renderer's tail, or an error."""
        try:
            if error := await self._ended:
                raise error
            failed = request_failure(self._ends)
            last = failed and self._generation.rename(failed)
            if self._size >= REPEATED:
                return await workers.run(self._size, lambda: self._renderer.tail() + self._close(last))
            return self._renderer.tail() + self._close(last)
        except RequestError as error:
            self._generation.cause = "error"
            return self._close(error)
        except Exception:
            self._generation.cause = "error"
            logger.exception("a stream failed")
            return self._close(RequestFailed("internal error"))


class StreamWriter:
    """Writes the events of one stream; sends a comment after `interval` seconds without events.

    A connection that has been blocked for `PATIENCE` seconds is stalled: its client does not read, or rendering is
    slower than generation.  The engine then makes no tokens for it, which would only fill the memory.
    """

    def __init__(self, send: Send, interval: float, write: Write = _never_write) -> None:
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
        self._rest = None
        self._on_free = self._on_stall = _ignore

    def write(self, events: bytes) -> None:
        """Send events.  If the client reads too slowly, `send` waits, and the connection is blocked meanwhile."""
        self._last = self._loop.time()
        events = escape_separators(events)
        if self._write(events):
            return
        sending = self._send({"type": "http.response.body", "body": events, "more_body": True}).__await__()
        try:
            waits_for = next(sending)  # the first step of a task; most sends complete in it and need no task
        except StopIteration:
            return
        self._block(_StartedAwaitable(waits_for, sending))

    def write_later(self, events: bytes, making: Coroutine[Any, Any, bytes]) -> None:
        """Send `events` and those that `making` returns; until then, the connection is blocked."""
        self._block(self._make(events, making))

    def _block(self, sending: Awaitable[None]) -> None:
        self.blocked = True
        self._patience = self._loop.call_later(PATIENCE, self._stall)
        self._rest = self._loop.create_task(self._finish(sending))

    async def _make(self, events: bytes, making: Coroutine[Any, Any, bytes]) -> None:
        body = escape_separators(events + await making)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

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
        body = escape_separators(events)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _tick(self) -> None:
        silence = self._loop.time() - self._last
        if silence >= self._interval:
            if not self.blocked:
                self.write(KEEP_ALIVE)
            silence = 0.0
        self._timer = self._loop.call_later(self._interval - silence, self._tick)


class _StartedAwaitable:
    """An awaitable whose first step has run: what that waits for, and the remaining steps."""

    def __init__(self, waits_for: Any, rest: Generator[Any, Any, Any]) -> None:
        self._waits_for = waits_for
        self._rest = rest

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._waits_for
        return (yield from self._rest)
