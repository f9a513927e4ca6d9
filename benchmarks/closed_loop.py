"""Closed-loop load on POST /inference/v1/generate that costs next to nothing: raw sockets, tokens counted, not parsed.

A server is measured with the client on the same cores, so the client takes time from the server, and most from
the faster one.  A connection sends its next request as soon as the previous reply is complete.  Requests are given
as bytes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

ROUTE = "/inference/v1/generate"
IDS_IN_REPLY = re.compile(rb'"token_ids": ?\[([0-9, ]*)\]')
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
FAILED = re.compile(rb'"finish_reason": ?"(error|abort|deadline)"|"error": ?\{')

Count = Callable[[int, int], None]  # receives numbers of tokens and of events
Check = Callable[[bytes], None]  # is given whole replies, head included


def request(body: bytes) -> bytes:
    """The whole request with this JSON."""
    head = f"POST {ROUTE} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Load:
    """The requests that are left, and what came of the others.  `stream`: whether replies are event streams."""

    def __init__(
        self, requests: Iterator[bytes], *, stream: bool, count: Count | None = None, check: Check | None = None
    ) -> None:
        self.stream = stream
        self.check = check
        self.tokens = self.events = 0
        self._requests = requests
        self._count = count
        self._open = 0
        self._done: asyncio.Future[None]

    async def run(self, port: int, concurrency: int) -> float:
        """Seconds from the first request to the last answer."""
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        connections = [
            await loop.create_connection(lambda: Connection(self), "127.0.0.1", port) for _ in range(concurrency)
        ]
        self._open = concurrency
        started = time.perf_counter()
        for _, connection in connections:
            connection.ask()
        await self._done
        seconds = time.perf_counter() - started
        for transport, _ in connections:
            transport.close()
        return seconds

    def next(self) -> bytes | None:
        """What the connection that asks is to send; None: it is done."""
        request = next(self._requests, None)
        if request is None:
            self._open -= 1
            if self._open == 0 and not self._done.done():
                self._done.set_result(None)
        return request

    def seen(self, tokens: int, events: int) -> None:
        """Tokens were read."""
        self.tokens += tokens
        self.events += events
        if self._count is not None:
            self._count(tokens, events)

    def ended(self, reply: bytes) -> None:
        """A reply is whole; nothing is kept of a stream that is not checked."""
        if self.check is not None:
            self.check(reply)

    def fail(self, reply: bytes) -> None:
        """Not what was asked for: the run ends."""
        if not self._done.done():
            self._done.set_exception(SystemExit(f"the server answered {reply[:500]!r}"))

    def lost(self, error: Exception | None) -> None:
        """The server hung up in the middle."""
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server hung up"))


class Connection(asyncio.Protocol):
    """A keep-alive connection."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._reply: list[bytes] = []
        self._size = 0
        self._rest = b""
        self._over = False
        self._begun = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over:
            self._load.lost(error)

    def ask(self) -> None:
        """Send the next request, if there is one."""
        request = self._load.next()
        self._reply, self._size, self._rest, self._begun = [], 0, b"", False
        if request is None:
            self._over = True
        else:
            self._transport.write(request)

    def data_received(self, received: bytes) -> None:
        if self._load.stream:
            self._follow(received)
        else:
            self._gather(received)

    def _follow(self, received: bytes) -> None:
        """Part of an event stream; an event may be cut anywhere."""
        load = self._load
        if load.check is not None:
            self._reply.append(received)
        seen = self._rest + received
        if not self._begun:
            self._begun = True
            if not seen.startswith(b"HTTP/1.1 200"):
                return load.fail(seen)
        id_lists = IDS_IN_REPLY.findall(seen)
        if id_lists:
            load.seen(sum(ids.count(b",") + 1 for ids in id_lists if ids), len(id_lists))
        if seen.endswith(b"\r\n0\r\n\r\n"):
            if FAILED.search(seen):
                return load.fail(seen)
            load.ended(b"".join(self._reply))
            self.ask()
        else:
            end = seen.rfind(b"\n\n")
            self._rest = seen[end:] if end >= 0 else seen

    def _gather(self, received: bytes) -> None:
        """Part of a reply that says how long it is."""
        self._reply.append(received)
        if not self._size:
            head = b"".join(self._reply)
            end = head.find(b"\r\n\r\n")
            if end < 0:
                return
            length = LENGTH.search(head, 0, end)
            if length is None or not head.startswith(b"HTTP/1.1 200"):
                return self._load.fail(head)
            self._size = end + 4 + int(length[1])
        if sum(map(len, self._reply)) >= self._size:
            reply = b"".join(self._reply)
            if FAILED.search(reply):
                return self._load.fail(reply)
            self._load.seen(sum(ids.count(b",") + 1 for ids in IDS_IN_REPLY.findall(reply) if ids), 1)
            self._load.ended(reply)
            self.ask()


def output_rate(port: int, bodies: list[bytes], concurrency: int, output_len: int, *, stream: bool) -> float:
    """Output tokens per second of wall time, after `concurrency` of the requests that are not counted."""
    requests = [request(body) for body in bodies]

    async def measure() -> float:
        warm = Load(iter(requests[:concurrency]), stream=stream)
        await warm.run(port, concurrency)
        load = Load(iter(requests[concurrency:]), stream=stream)
        seconds = await load.run(port, concurrency)
        expected = output_len * (len(requests) - concurrency)
        if load.tokens != expected:
            raise SystemExit(f"{load.tokens} tokens came, {expected} were requested")
        return load.tokens / seconds

    return uvloop.run(measure())
