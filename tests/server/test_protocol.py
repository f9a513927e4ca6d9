"""Streams written without `send`: the bytes that `send` would write, as long as the client reads."""

import asyncio
import logging
import weakref
from functools import partial
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tests.server.site import Caller, parse_events, site
from tokserve.server.http.protocol import _write
from tokserve.server.replies.sse import WRITE

BODY = {"token_ids": [5, 6, 8], "stream": True, "sampling_params": {"max_tokens": 6, "seed": 3}, "request_id": "r"}
EVENT = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data


def cycle_on(transport: Transport) -> RequestResponseCycle:
    log = logging.getLogger("cycle")
    return RequestResponseCycle(
        {"type": "http", "method": "POST"},  # type: ignore[typeddict-item]
        transport,
        FlowControl(transport),
        log,
        log,
        False,
        [],
        asyncio.Event(),
        False,
        True,
        lambda: None,
    )


class Served(Caller):
    """A caller whose messages go through uvicorn's `send`, or are written directly."""

    def __init__(self, past: bool) -> None:
        self.transport = Transport()
        self.cycle = cycle_on(self.transport)
        self.past = 0
        super().__init__(site(), "/inference/v1/generate", BODY)
        if past:
            self.scope[WRITE] = self._write

    def _write(self, events: bytes) -> bool:
        self.past += 1
        return _write(weakref.ref(self.cycle), events)

    async def _send(self, message: Any) -> None:
        await self.cycle.send(message)


def test_a_stream_has_the_same_bytes_past_send() -> None:
    async def scene(past: bool) -> Served:
        served = Served(past)
        await served.task
        return served

    by_send, past_send = asyncio.run(scene(past=False)), asyncio.run(scene(past=True))
    assert (by_send.past, past_send.past) == (0, 6)
    responses = [served.transport.written.split(b"\r\n\r\n", 1) for served in (by_send, past_send)]
    assert responses[0][0] == responses[1][0] and b"transfer-encoding: chunked" in responses[0][0]
    bodies = [unchunked(body) for _, body in responses]
    assert [len(chunk) for chunk in bodies[0]] == [len(chunk) for chunk in bodies[1]]
    streams = [parse_events(b"".join(chunks).decode()) for chunks in bodies]
    for events in streams:
        del events[0]["created"]
    assert streams[0] == streams[1]


def unchunked(body: bytes) -> list[bytes]:
    chunks = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        assert body[int(size, 16) :][:2] == b"\r\n"
        body = body[int(size, 16) + 2 :]
    return chunks


@pytest.mark.parametrize("state", ["not begun", "paused", "hung up"])
def test_writes_that_need_flow_control_use_send(state: str) -> None:
    async def scene() -> tuple[bool, bytes]:
        transport = Transport()
        cycle = cycle_on(transport)
        write = partial(_write, weakref.ref(cycle))
        if state != "not begun":
            await cycle.send({"type": "http.response.start", "status": 200, "headers": []})
        if state == "paused":
            cycle.flow.pause_writing()
        cycle.disconnected = state == "hung up"
        before = transport.written
        done = write(EVENT["body"])  # type: ignore[arg-type]
        return done, transport.written.removeprefix(before)

    assert asyncio.run(scene()) == (state == "hung up", b"")
