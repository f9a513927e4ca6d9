"""Encodes large replies in parts, while they are sent.

A value is deferred: the JSON of the reply has a mark in its place, and the value is encoded in a thread when the bytes
before it have been sent.  So a reply takes the memory of its columns, not that of its JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from msgspec import Raw
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokserve.server.http import body, workers
from tokserve.server.http.disconnect import CancelOnDisconnect, ClientDisconnected

MARK = b"\0"  # does not occur in JSON
PART = 4096  # values in a part of a list: a few milliseconds of work

PartEncoder = Callable[[], Iterator[bytes]]


class DeferredParts:
    """The deferred values of one reply."""

    def __init__(self) -> None:
        self._encoders: list[PartEncoder] = []

    def defer(self, encoder: PartEncoder) -> Raw:
        """A placeholder for the value that `encoder` encodes."""
        self._encoders.append(encoder)
        return Raw(MARK + str(len(self._encoders) - 1).encode() + MARK)

    def encode(self, json: bytes) -> Iterator[bytes]:
        """The JSON of the reply, in parts; `json` has the placeholders."""
        for index, part in enumerate(json.split(MARK)):
            if index % 2:
                yield from self._encoders[int(part)]()
            else:
                yield part


def single_part(make: Callable[[], Any]) -> PartEncoder:

    def fill() -> Iterator[bytes]:
        yield body.encode_json(make())

    return fill


def encode_list(count: int, width: int, make: Callable[[int, int], list[Any]]) -> Iterator[bytes]:
    """Encode a list of `count` entries of about `width` values; `make(begin, end)` returns some of them."""
    step = max(1, PART // (width + 1))
    yield b"["
    for start in range(0, count, step):
        inner = body.encode_json(make(start, min(count, start + step)))[1:-1]
        yield b"," + inner if start else inner
    yield b"]"


class PartedResponse(Response):
    """A 200 whose JSON is encoded while it is sent.  Ends when the client disconnects."""

    def __init__(self, parts: Iterator[bytes], headers: Mapping[str, str]) -> None:
        self.background = None
        self.status_code = 200
        self._parts = parts
        self.init_headers({"content-type": body.JSON, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with CancelOnDisconnect(receive):
                while part := await workers.run(workers.LARGE, partial(_joined, self._parts)):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ClientDisconnected:
            pass


def _joined(parts: Iterator[bytes], size: int = 1 << 16) -> bytes:
    """The next parts, joined to at least `size` bytes; b"" at the end."""
    joined = bytearray()
    for part in parts:
        joined += part
        if len(joined) >= size:
            break
    return bytes(joined)
