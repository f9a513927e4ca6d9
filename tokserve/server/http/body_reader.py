"""Reads and decodes request bodies, with limits on size, time and values of one body and on the memory of all.

Every POST route reads its body here.  Limits are checked before a body is decoded, because decoding holds the
interpreter's lock and multiplies its size.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections import deque
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request

from tokserve.base.errors import LONGEST_SHOWN, Overloaded, TimedOut, TooLarge, UnsupportedMedia
from tokserve.base.memory import free_in_parts, unmap
from tokserve.config import LimitsConfig
from tokserve.server.http import body
from tokserve.server.http.disconnect import ClientDisconnected
from tokserve.server.http.workers import LARGE, in_background, off_loop

Buffer = bytes | bytearray | memoryview
HELD = "tokserve.body_memory"  # key in the scope: bytes of memory counted for the request's body; None: released
DECODED = "tokserve.decoded_body"  # key in the scope: a large body as dictionaries and lists
FREE = 1 << 18  # bytes of a body that are not counted: small requests pass when large ones use all the memory
VALUE_BYTES = 32  # approximate memory of a decoded value
CONTAINER_VALUES = 8  # an object or a list counts as so many values: it takes as long to decode
NAME_VALUES = 3  # and an entry of an object as so many, with its name and value
COUNTED = 1 << 13  # values are counted in bodies of at least so many bytes
COUNTED_AT_ONCE = 1 << 18  # bytes
PATIENCE = 10  # a whole body may take so many times `body_timeout`
RETRY_SECONDS = 2
FREE_SECONDS = 0.1  # from the end of a request to the freeing of its body; until then frames of its errors may exist


def free_at_end(request: Request, size: int, decoded: Any) -> None:
    """Have `BodyReader.end` free what a body of `size` bytes holds, if that is much."""
    if size >= LARGE:
        request.scope[DECODED] = decoded


class BodyReader:
    """Reads bodies within the limits, and counts the memory of all that are not released: `held` bytes."""

    def __init__(self, limits: LimitsConfig, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_values = limits.max_body_values
        self._max_held = limits.max_body_memory_bytes
        self._timeout = limits.body_timeout
        self.held = 0
        self._lock = threading.Lock()  # of `held`: threads count values
        self._turns: deque[asyncio.Future[None]] = deque()  # of large bodies that arrive

    async def read(self, request: Request) -> Buffer:
        """The whole body.  Raises `TooLarge` as soon as that is known, `TimedOut` if it does not arrive, `Overloaded`
        if there is no memory left for it, `ClientDisconnected`."""
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise UnsupportedMedia(
                f"Content-Encoding {encoding[:LONGEST_SHOWN]!r} is not supported; send the body uncompressed",
                code="content_encoding",
                headers={"Accept-Encoding": "identity"},
            )
        length = request.headers.get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_bytes):
            raise self._too_large()
        buffer = _BodyBuffer(int(length) if length.isdigit() else 0)
        complete = False
        try:
            async with asyncio.timeout(self._timeout) as timeout:
                content = await self._receive(request, buffer, timeout)
            complete = True
            return content
        except TimeoutError:
            raise TimedOut(
                f"the body did not arrive: no bytes for {self._timeout:g} s (--body-timeout), or not all of it in "
                f"{PATIENCE} times as long",
                code="body_timeout",
            ) from None
        finally:
            if not complete:
                buffer.clear()  # the error's traceback would keep the memory

    async def _receive(self, request: Request, buffer: _BodyBuffer, timeout: asyncio.Timeout) -> Buffer:
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE * self._timeout
        while True:
            if buffer.size > FREE:
                await self._turn()
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            piece: bytes = message.get("body", b"")
            size = buffer.size + len(piece)
            if size > self._max_bytes:
                raise self._too_large()
            if size > FREE:
                self._hold(request, size)
            if not (buffer.size or message.get("more_body", False)):
                return piece
            buffer.add(piece)
            if not message.get("more_body", False):
                return buffer.content()
            timeout.reschedule(min(end, loop.time() + self._timeout))

    async def _turn(self) -> None:
        """Wait for the turn to take another part of a large body: one part in each turn of the event loop, which
        others' requests wait for.  Meanwhile the connection is not read."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        if len(self._turns) == 1:
            turn.get_loop().call_soon(self._next_turn)
        await turn

    def _next_turn(self) -> None:
        turn = self._turns.popleft()
        if not turn.done():  # cancelled
            turn.set_result(None)
        if self._turns:
            turn.get_loop().call_soon(self._next_turn)

    async def decode(self, request: Request, raw: Buffer) -> Any:
        """The body as dictionaries and lists, decoded by its content type."""
        packed = body.is_msgpack(request)

        def work() -> Any:
            self.check_values(request, raw, packed)
            return body.decode(raw, packed)

        value = await off_loop(request, len(raw), work)
        free_at_end(request, len(raw), value)
        return value

    async def load(self, request: Request) -> tuple[Any, int]:
        """The whole body as dictionaries and lists, and its size in bytes."""
        body.is_msgpack(request)  # refuses other content types before reading the body
        raw = await self.read(request)
        return await self.decode(request, raw), len(raw)

    def check_values(self, request: Request, raw: Buffer, packed: bool) -> None:
        """Raise `TooLarge` for a body with too many values, `Overloaded` if there is no memory left to decode it."""
        if len(raw) < COUNTED:
            return
        values = _packed_values(raw, self._max_values) if packed else _json_values(raw)
        if values > self._max_values:
            raise TooLarge(
                f"the body has more than {self._max_values} values (--max-body-values; an object or a list counts as "
                f"{CONTAINER_VALUES}, a name as {NAME_VALUES - 1})",
                code="too_many_values",
            )
        self._hold(request, len(raw) + VALUE_BYTES * values)

    def _hold(self, request: Request, size: int) -> None:
        """Count `size` bytes of memory for a request's body, unless it was released: a thread may still count values
        when the client has disconnected."""
        with self._lock:
            before = request.scope.get(HELD, 0)
            if before is None:
                return
            after = max(before, size - FREE)
            held = self.held + after - before
            if held <= self._max_held:
                self.held, request.scope[HELD] = held, after
                return
        raise Overloaded(
            f"the bodies of all requests would need more than {self._max_held >> 20} MiB (--max-body-memory-bytes)",
            retry_after=RETRY_SECONDS,
            code="body_memory",
        )

    def release(self, request: Request) -> None:
        """Give back the memory counted for a request's body, and count no more for it; a second call does nothing."""
        with self._lock:
            self.held -= request.scope.get(HELD) or 0
            request.scope[HELD] = None

    def end(self, request: Request) -> None:
        """Release the body; a thread frees it if it is large, when what the request has done refers to it no more."""
        self.release(request)
        if DECODED in request.scope:
            free = partial(free_in_parts, [request.scope.pop(DECODED)])
            asyncio.get_running_loop().call_later(FREE_SECONDS, in_background, free)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._max_bytes >> 20} MiB (--max-body-mb)", code="body_too_large")


class _BodyBuffer:
    """The part of a body that has been received.  A large one is in mapped pages, which are not copied as it grows, and
    return to the system."""

    def __init__(self, announced: int) -> None:
        self.size = 0
        self._announced = announced
        self._small = bytearray()
        self._pages: mmap.mmap | None = None

    def add(self, piece: bytes) -> None:
        size = self.size + len(piece)
        if self._pages is None and size <= FREE:
            self._small += piece
        else:
            if self._pages is None or size > len(self._pages):
                self._grow(max(size, self._announced, 4 * self.size))
            assert self._pages is not None
            self._pages[self.size : size] = piece
        self.size = size

    def _grow(self, size: int) -> None:
        """Have `size` bytes of pages, which take no memory until they are written."""
        if self._pages is not None:
            self._pages.resize(size)  # their addresses change, and nothing is copied
            return
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages[: self.size] = self._small
        self._small = bytearray()

    def content(self) -> Buffer:
        return self._small if self._pages is None else memoryview(self._pages)[: self.size]

    def clear(self) -> None:
        self._small.clear()
        if self._pages is not None:
            in_background(partial(unmap, self._pages))


_WEIGHTS = ((ord(","), 1), (ord(":"), NAME_VALUES), (ord("{"), CONTAINER_VALUES), (ord("["), CONTAINER_VALUES))


def _json_values(raw: Buffer) -> int:
    """The approximate number of values; commas, colons and brackets within strings count too.  numpy does not hold the
    interpreter's lock meanwhile."""
    characters, values = np.frombuffer(raw, np.uint8), 0
    for start in range(0, len(characters), COUNTED_AT_ONCE):
        part = characters[start : start + COUNTED_AT_ONCE]
        for character, weight in _WEIGHTS:
            values += weight * int(np.count_nonzero(part == character))
    return values


def _packed_values(raw: Buffer, limit: int) -> int:
    """The number of values in msgpack, or a number above `limit`; counting ends where it is not msgpack."""
    at = values = 0
    while at < len(raw) and values <= limit:
        kind = raw[at]
        values += 1
        if 0x80 <= kind < 0xA0 or 0xDC <= kind < 0xE0:
            values += CONTAINER_VALUES - 1 + (NAME_VALUES - 2) * _entries(raw, at, kind)
        at += 1 + _size_after(raw, at, kind)
    return values


_FIXED = {  # types of fixed length: bytes after the first
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
    0xD4: 2,
    0xD5: 3,
    0xD6: 5,
    0xD7: 9,
    0xD8: 17,
    0xDC: 2,
    0xDD: 4,
    0xDE: 2,
    0xDF: 4,
}
_COUNTED = {  # types with a length field: its bytes, and further bytes
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}


def _entries(raw: Buffer, at: int, kind: int) -> int:
    """The number of entries of a map; 0 for an array."""
    if kind < 0x90:
        return kind - 0x80
    width = {0xDE: 2, 0xDF: 4}.get(kind, 0)
    return int.from_bytes(raw[at + 1 : at + 1 + width], "big")


def _size_after(raw: Buffer, at: int, kind: int) -> int:
    """Bytes of the value at `at` after its first, without the values inside an array or a map."""
    if 0xA0 <= kind < 0xC0:
        return kind - 0xA0
    if kind in _COUNTED:
        width, extra = _COUNTED[kind]
        return width + extra + int.from_bytes(raw[at + 1 : at + 1 + width], "big")
    return _FIXED.get(kind, 0)
