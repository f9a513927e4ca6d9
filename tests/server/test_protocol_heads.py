"""Limits of time and memory for a request's head."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tokserve.server.http.protocol import MAX_HEAD, PARSED_AT_ONCE, Protocol
from tokserve.server.replies.sse import STALLED

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
PIECE = b"a" * 1000


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.aborted = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, whatever it is, and says ok."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Begins an answer to GET at once; does not end it."""
    if scope["method"] == "GET":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def connected(app: Any = app, **options: Any) -> Iterator[tuple[Protocol, Wire]]:
    """A connection; in a running loop."""
    config = uvicorn.Config(app, http=Protocol, ws="none", log_config=None, timeout_keep_alive=75)
    config.load()
    connection, wire = Protocol(config, ServerState(), {}, **options), Wire()
    connection.connection_made(wire)
    try:
        yield connection, wire
    finally:
        connection.connection_lost(None)
        assert connection.timeout_keep_alive_task is None


def feed(connection: Protocol, wire: Wire, *pieces: bytes) -> int:
    """Bytes taken until the connection was closed."""
    taken = 0
    for piece in pieces:
        if wire.closed:
            break
        connection.data_received(piece)
        taken += len(piece)
    return taken


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n" + PIECE])
def test_a_head_without_end_is_cut_off(begin: bytes) -> None:
    async def scene() -> None:
        with connected() as (connection, wire):
            taken = feed(connection, wire, begin, *[PIECE] * 1000)
            assert MAX_HEAD < taken <= MAX_HEAD + len(begin) + len(PIECE)
            assert wire.written.startswith(b"HTTP/1.1 431 ") and b'"code":"head_too_large"' in wire.written

    asyncio.run(scene())


@pytest.mark.parametrize("body", [b"5\r\nhello\r\n0\r\n", b"0\r\n"])
def test_trailers_without_end_are_cut_off(body: bytes) -> None:
    async def scene() -> None:
        with connected() as (connection, wire):
            taken = feed(connection, wire, HEAD + b"\r\n" + body, *[b"X: " + PIECE + b"\r\n"] * 1000)
            assert wire.closed and taken < 2 * MAX_HEAD

    asyncio.run(scene())


def test_a_body_is_no_head() -> None:
    async def scene() -> None:
        with connected() as (connection, wire):
            feed(connection, wire, HEAD + b"\r\n", *[b"3e8\r\n" + PIECE + b"\r\n"] * 200, b"0\r\n\r\n")
            feed(connection, wire, *[b"GET / HTTP/1.1\r\nHost: a\r\nX: " + PIECE + b"\r\n\r\n"] * 200)
            async with asyncio.timeout(30):
                while wire.written.count(b"HTTP/1.1 200 OK") < 201:
                    await asyncio.sleep(0)
            assert not wire.closed

    asyncio.run(scene())


GET, POST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\ncontent-length: 0\r\n\r\n"
GARBAGE, BROKEN = b"garbage\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n"


@pytest.mark.parametrize(
    ("first", "second", "answer"),
    [
        (GET, BROKEN, b"4\r\npart\r\n"),
        (GET, GET + BROKEN, b"4\r\npart\r\n"),
        (b"", GARBAGE, b'"code":"invalid_http"}}'),
        (b"", BROKEN, b'"code":"invalid_http"}}'),
    ],
)
def test_a_refusal_is_not_written_into_another_reply(first: bytes, second: bytes, answer: bytes) -> None:
    async def scene() -> None:
        with connected(endless) as (connection, wire):
            connection.data_received(first)
            for _ in range(10):  # what has come is begun
                await asyncio.sleep(0)
            connection.data_received(second)
            assert wire.closed and wire.written.endswith(answer)
            assert wire.written.count(b"HTTP/1.1 ") == bool(answer)

    asyncio.run(scene())


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("pieces", [1, 2])
def test_whole_requests_are_answered_before_garbage_closes_the_connection(requests: int, pieces: int) -> None:
    """Garbage follows, for example, from a body that is longer than its Content-Length."""

    async def scene() -> None:
        with connected() as (connection, wire):
            sent = [POST * requests, GARBAGE, POST]
            feed(connection, wire, *([b"".join(sent)] if pieces == 1 else sent))
            while not wire.closed:
                await asyncio.sleep(0.001)
            assert wire.written.count(b"HTTP/1.1 200 OK") == wire.written.count(b"HTTP/1.1 ") == requests
            assert wire.written.count(b"connection: close") == 1

    asyncio.run(scene())


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * (MAX_HEAD + 1) + b" HTTP/1.1\r\nHost: a",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * MAX_HEAD,
        b"GET / HTTP/1.1\r\nHost: a" + b"\r\nX: a" * (MAX_HEAD // 6),
    ],
)
def test_a_large_head_in_one_piece_is_refused(head: bytes) -> None:
    async def scene() -> None:
        with connected() as (connection, wire):
            connection.data_received(head + b"\r\n\r\n")
            assert (
                wire.closed and wire.written.startswith(b"HTTP/1.1 431 ") and b'"code":"head_too_large"' in wire.written
            )

    asyncio.run(scene())


def test_the_timeout_of_a_head_is_not_extended_by_its_bytes() -> None:
    async def scene() -> None:
        with connected() as (connection, wire):
            timer = connection.timeout_keep_alive_task
            assert timer is not None and timer.when() <= asyncio.get_running_loop().time() + 75
            feed(connection, wire, b"G", b"ET / HTTP/1.1\r\n", b"Host: a\r\n", b"X")
            assert connection.timeout_keep_alive_task is timer and not timer.cancelled()
            feed(connection, wire, b": a\r\n\r\n")
            assert timer.cancelled() and connection.timeout_keep_alive_task is None
            async with asyncio.timeout(30):
                while b"ok" not in wire.written:
                    await asyncio.sleep(0)
            again = connection.timeout_keep_alive_task
            assert again is not None
            feed(connection, wire, b"GET / HTT")
            assert not again.cancelled()
            connection.timeout_keep_alive_handler()
            assert wire.closed

    asyncio.run(scene())


@pytest.mark.parametrize("version", [b"2.0", b"0.9"])
def test_other_versions_of_http_are_refused(version: bytes) -> None:
    async def scene() -> None:
        with connected() as (connection, wire):
            feed(connection, wire, b"GET / HTTP/" + version + b"\r\nHost: a\r\n\r\n")
            assert wire.closed and wire.written.startswith(b"HTTP/1.1 505 "), wire.written
            assert b'"code":"http_version"' in wire.written

    asyncio.run(scene())


def chunked(count: int, size: int) -> bytes:
    return (b"%x\r\n" % size + b"x" * size + b"\r\n") * count


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (chunked(1000, 1), b"HTTP/1.1 200 "),
        (chunked(5000, 100), b"HTTP/1.1 200 "),
        (chunked(2000, 1), b"HTTP/1.1 400 "),
        (chunked(100, 2000) + chunked(8000, 1), b"HTTP/1.1 400 "),
    ],
)
def test_a_body_in_many_tiny_chunks_is_refused(body: bytes, answer: bytes) -> None:
    async def scene() -> None:
        with connected() as (connection, wire):
            feed(connection, wire, HEAD + b"\r\n", body, b"0\r\n\r\n")
            while not wire.written:
                await asyncio.sleep(0.001)
            assert wire.written.startswith(answer), wire.written
            assert (b'"code":"small_chunks"' in wire.written) == answer.endswith(b"400 ")

    asyncio.run(scene())


def test_the_pieces_of_a_body_are_gathered() -> None:
    messages: list[bytes] = []

    async def reader(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            messages.append(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def scene() -> None:
        with connected(reader) as (connection, wire):
            feed(connection, wire, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(999):
                feed(connection, wire, b"x")
                await asyncio.sleep(0)
            while b"".join(messages) != b"x" * 999:  # they arrive though the body goes on
                await asyncio.sleep(0.001)
            feed(connection, wire, b"y")
            while not wire.written:
                await asyncio.sleep(0.001)

    asyncio.run(scene())
    assert b"".join(messages) == b"x" * 999 + b"y" and len(messages) < 100


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_does_not_read_its_reply_is_disconnected(reads: bool) -> None:
    async def scene() -> tuple[bool, bool]:
        with connected(endless, stall_timeout=0.02) as (connection, wire):
            feed(connection, wire, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            connection.pause_writing()
            if reads:
                connection.resume_writing()
                await asyncio.sleep(0.1)
            while not (reads or wire.aborted):
                await asyncio.sleep(0.001)
            assert connection.cycle is not None
            return wire.aborted, STALLED in connection.cycle.scope

    assert asyncio.run(scene()) == (not reads, not reads)


def test_without_a_timeout_a_paused_connection_stays_open() -> None:
    async def scene() -> bool:
        with connected(endless) as (connection, wire):
            connection.pause_writing()
            await asyncio.sleep(0.05)
            return wire.aborted

    assert not asyncio.run(scene())


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a", 400),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b", 400),
        (b"GET / HTTP/1.0", 200),
        (b"GET / HTTP/1.1\r\nhOST: a", 200),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked", 200),
    ],
)
def test_a_head_that_a_proxy_may_read_in_another_way_is_refused(head: bytes, status: int) -> None:
    async def scene() -> None:
        with connected() as (connection, wire):
            feed(connection, wire, head + b"\r\n\r\n" + (b"0\r\n\r\n" if head.startswith(b"POST") else b""))
            while not wire.written:
                await asyncio.sleep(0.001)
            assert wire.written.split()[1] == str(status).encode(), wire.written
            assert wire.closed == (status == 400) or head.endswith(b"1.0"), "what follows must not be read"

    asyncio.run(scene())


@pytest.mark.slow
def test_requests_behind_others_are_parsed_when_those_are_answered() -> None:
    """Ten thousand in one packet: kilobytes each, and milliseconds for every hundred."""
    most = 0

    class Watched(Wire):
        paused = False

        def pause_reading(self) -> None:
            self.paused = True

        def resume_reading(self) -> None:
            self.paused = False

    async def scene() -> None:
        nonlocal most
        requests = [b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n" % i + b"x" * 9000 for i in range(9)]
        requests += [b"GET /%d HTTP/1.1\r\nHost:a\r\n\r\n" % i for i in range(9, 10_000)]
        seen = []

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            nonlocal most
            seen.append(scope["path"])
            most = max(most, len(connection.pipeline))
            await app(scope, receive, send)

        config = uvicorn.Config(counted, http=Protocol, ws="none", log_config=None)
        config.load()
        connection, wire = Protocol(config, ServerState(), {}), Watched()
        connection.connection_made(wire)
        for i in range(0, 10_000, 5000):
            connection.data_received(b"".join(requests[i : i + 5000]))
            assert wire.paused and not wire.closed
        while wire.written.count(b"HTTP/1.1 200 OK") < 10_000:
            assert not wire.closed
            await asyncio.sleep(0)
        assert seen == [f"/{i}" for i in range(10_000)]
        assert not wire.paused, "the connection is not read any more"
        connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert 0 < most <= PARSED_AT_ONCE // 27
