"""HTTP/1.1 on a connection: uvicorn's, except that nothing is upgraded, that every refusal has our shape, that a
request's head is bounded in size and in time, and that HTTP/1.0 (which nginx speaks to servers, if nothing is said) is
not answered in chunks.

Java's HTTP client, for one, offers h2c with every request in clear; the parser takes such a request's body for the
other protocol.  RFC 9110 (7.8) lets a server ignore the offer, so the request is read again without it.
Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tokserve.errors import RequestError
from tokserve.server import errors, sse

OFFER = (b"upgrade", b"http2-settings")
MAX_HEAD = 64 << 10  # bytes of a request before its body; one that comes in one piece may have a little more


class HeadTooLarge(RequestError):
    """431: the request line and the headers are over the limit."""

    status = 431


class Protocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=Protocol, ws="none")`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: int | None = 0  # bytes so far of a head, or of trailers, without an end; None in a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection has as long to send its first head as it has between two requests."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """However it was lost."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _read(self, received: bytes) -> None:
        if self._head is not None:
            self._head += len(received)
        try:
            self.parser.feed_data(received)
        except httptools.HttpParserUpgrade as offered:
            self._decline(received[offered.args[0] :])
        except httptools.HttpParserError:
            self.logger.info("not HTTP/1.1")
            self._hang_up(RequestError("the request is not valid HTTP/1.1", code="invalid_http"))
        else:
            if self._head is not None and self._head > MAX_HEAD:
                self._hang_up(HeadTooLarge(f"the headers are larger than {MAX_HEAD >> 10} KiB", code="head_too_large"))

    data_received = _read  # type: ignore[assignment]  # asyncio's name for it; its argument has another

    def on_headers_complete(self) -> None:
        """Begin the request, unless it offers an upgrade: then it is read again first."""
        self._head = None
        if not self.parser.should_upgrade():
            self._unset_keepalive_if_required()  # a part of a head is no sign of life: one may come for ever
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                cycle: Any = self.cycle  # its task has not begun, and takes `send` when it does
                cycle.send = _without_chunks(self.cycle)
            self.scope[sse.WRITE] = partial(_write, self.cycle)  # type: ignore[literal-required]
            self.headers = []  # what still comes are trailers, which are no headers of the request

    def on_chunk_header(self) -> None:
        """After the last chunk's come the trailers."""
        self._head = 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._head = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request's body."""
        self._head = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline(self, rest: bytes) -> None:
        """Read the head again without the offer, and then what follows it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._hang_up(RequestError("CONNECT is for proxies", code="invalid_http"))
            return
        lines = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name not in OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._read(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _hang_up(self, error: RequestError) -> None:
        """Refuse what is no request, and close; a client that waits for the answer to another gets no refusal."""
        cycle = self.cycle
        broken = cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline
        if cycle is None or cycle.response_complete or broken:
            body = errors.body(error)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle) -> Send:
    """`cycle.send` for HTTP/1.0, which has no chunks: a body whose length is not told ends with the connection."""
    send = cycle.send
    untold = False

    async def plain(message: Message) -> None:
        nonlocal untold
        if message["type"] == "http.response.start":
            untold = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if untold else None
        elif untold:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return plain


def _write(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Part of a body of unknown length, at once.  False: it must go through `cycle.send`, which can wait.

    These are the bytes that `cycle.send` would write, without a coroutine, its message and its checks.
    """
    if cycle.flow.write_paused or not cycle.chunked_encoding:
        return False
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
