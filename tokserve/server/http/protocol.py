"""HTTP/1.1 on a connection: uvicorn's protocol, with eight differences.

Upgrades are declined and versions other than 1.0 and 1.1 refused; refusals have the form of other errors; a request's
head is limited in size and in time; HTTP/1.0 (nginx's default towards upstreams) gets no chunked response; the pieces
of a body are gathered before the application is woken, and many tiny chunks are refused; a client that does not read
its reply is disconnected after a time; requests behind others of their connection are parsed when those are answered.
Java's HTTP client offers h2c with every plain request, and the parser would
take such a request's body for the other protocol.  RFC 9110 (7.8) lets a server ignore the offer, so the request is
parsed again without it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from functools import partial
from typing import Any, NoReturn

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tokserve.base.errors import RequestError
from tokserve.server.http import client_names, errors

logger = logging.getLogger(__name__)

OFFER = (b"upgrade", b"http2-settings")
VERSIONS = ("1.0", "1.1")
GATHERED = 1 << 14  # bytes of a body that wake the application
GATHER_SECONDS = 0.005  # limit of time that fewer bytes wait
FREE_CHUNKS = 1024  # so many chunks of a body may have any size
MIN_CHUNK = 64  # mean bytes of a chunk, at least, in a body of more chunks
WRITE = "tokserve.write"  # key of a `Write` in the scope of a request: writes to its connection without a task
STALLED = "tokserve.stalled"  # key in the scope of a request whose client was disconnected because it did not read
MAX_DIGITS = 18  # of a body's length
MAX_HEAD = 64 << 10  # bytes of a request before its body
PARSED_AT_ONCE = 1 << 13  # bytes, but for those of a body: 300 requests at most, which take some milliseconds


class HeadTooLarge(RequestError):
    """431: the request line and the headers are over the limit."""

    status = 431


class VersionNotSupported(RequestError):
    """505: the request line names a version of HTTP that is not served here."""

    status = 505


class Protocol(HttpToolsProtocol):
    """The class to give to uvicorn: `Config(http=Protocol, ws="none")`.

    `stall_timeout`: seconds that a connection may be full before it is closed, 0 for any time.
    """

    def __init__(self, *args: Any, stall_timeout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_timeout = stall_timeout
        self._stall_timer: asyncio.TimerHandle | None = None  # while the connection is full
        self._head: int | None = 0  # bytes so far of an unfinished head, or of trailers; None in a body
        self._refusal: RequestError | None = None  # why the parser was stopped
        self._ended = False  # what follows the last request is not HTTP/1.1, and not read
        self._pieces: list[bytes] = []  # of the body, not yet passed to the application
        self._gathered = 0  # their bytes
        self._gathering: asyncio.TimerHandle | None = None
        self._chunks = self._chunked = 0  # of the current body, and their bytes
        self._left = 0  # bytes of the current body that have not come, if its length was announced
        self._unparsed = memoryview(b"")  # what follows requests that wait for their turn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timer, which limits the time for the first head, too."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        """The connection is full: the client does not read as fast as the server writes, or not at all."""
        super().pause_writing()
        if self._stall_timeout and self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._stall_timeout, self._disconnect_stalled)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _disconnect_stalled(self) -> None:
        self._stall_timer = None
        logger.warning(
            "a client did not read its reply for %g s (stream_stall_timeout): the connection from %s is closed",
            self._stall_timeout,
            self.client and self.client[0],
        )
        if self.cycle is not None:
            self.cycle.scope[STALLED] = True  # type: ignore[literal-required]
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_stall_timer()
        self._flush()
        self._unparsed = memoryview(b"")
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _read(self, received: bytes) -> None:
        """Parse what was received, unless requests wait for their turn: thousands of them fit into one packet, and each
        takes kilobytes."""
        rest = memoryview(b"".join((self._unparsed, received)) if self._unparsed else received)
        while rest and not (self.pipeline or self._ended or self.transport.is_closing()):
            size = max(PARSED_AT_ONCE, self._left)
            part, rest = rest[:size], rest[size:]
            self._parse(part)
        if self._ended or self.transport.is_closing():
            rest = memoryview(b"")
        self._unparsed = rest
        if rest:
            self.flow.pause_reading()

    def _parse(self, received: bytes | memoryview) -> None:
        if self._head is not None:
            self._head += len(received)
        try:
            self.parser.feed_data(received)
        except httptools.HttpParserUpgrade as offered:
            self._decline(bytes(received[offered.args[0] :]))
        except httptools.HttpParserError:
            self.logger.info("not HTTP/1.1")
            invalid = RequestError("the request is not valid HTTP/1.1", code="invalid_http")
            self._hang_up(self._refusal or invalid)
        else:
            if self._head is not None and self._head > MAX_HEAD:
                self._hang_up(_head_too_large())

    data_received = _read  # type: ignore[assignment]  # asyncio's name for it; there, the argument is `data`

    def on_response_complete(self) -> None:
        """Go on with the requests that follow on this connection."""
        super().on_response_complete()
        if self._unparsed:
            self._read(b"")

    def on_headers_complete(self) -> None:
        """Begin the request, unless it offers an upgrade: then it is first parsed again."""
        self._head = None
        self._chunks = self._chunked = self._left = 0
        if self.parser.get_http_version() not in VERSIONS:
            self._refuse(VersionNotSupported("this server speaks HTTP/1.1", code="http_version"))
        self._check_head()
        if not self.parser.should_upgrade():
            self._unset_keepalive_if_required()  # only for a whole head: a client could send one byte by byte
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                cycle: Any = self.cycle  # its task has not begun, and reads `send` when it begins
                cycle.send = _without_chunks(weakref.ref(self.cycle))
            self.scope[client_names.PEER] = self.client and self.client[0]  # type: ignore[literal-required]
            self.scope[WRITE] = partial(_write, weakref.ref(self.cycle))  # type: ignore[literal-required]
            self.headers = []  # what comes from here on are trailers, which are not part of the request's headers

    def _check_head(self) -> None:
        """Refuse a head that is too large, or that a proxy in front may read in another way (RFC 9112, 3.2 and 6.1)."""
        hosts, size = 0, len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + len(": \r\n")
            if name == b"host":
                hosts += 1
            elif name == b"content-length" and value.isdigit() and len(value) < MAX_DIGITS:
                self._left = int(value)
            elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                what = "the only transfer-encoding that this server knows is chunked"
                self._refuse(RequestError(what, code="invalid_http"))
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._refuse(RequestError("a request must have exactly one Host header", code="invalid_http"))
        if size > MAX_HEAD:
            self._refuse(_head_too_large())

    def on_chunk_header(self) -> None:
        """Count chunks, which cost time of the event loop, and the bytes of trailers, which follow the last header."""
        self._head = 0
        self._chunks += 1
        if self._chunks > FREE_CHUNKS and self._chunked < MIN_CHUNK * (self._chunks - 1):
            what = f"the body comes in more than {FREE_CHUNKS} chunks of fewer than {MIN_CHUNK} bytes on average"
            self._refuse(RequestError(what, code="small_chunks"))

    def on_body(self, body: bytes) -> None:
        """Gather parts of the body."""
        self._head = None
        self._chunked += len(body)
        self._left = max(0, self._left - len(body))
        self._pieces.append(body)
        self._gathered += len(body)
        if self._gathered >= GATHERED:
            self._flush()
        elif self._gathering is None:
            self._gathering = self.loop.call_later(GATHER_SECONDS, self._flush)

    def _flush(self) -> None:
        """Pass the gathered parts to the application."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._pieces:
            pieces, self._pieces, self._gathered = self._pieces, [], 0
            super().on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def on_message_complete(self) -> None:
        self._flush()
        self._head = self._left = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline(self, rest: bytes) -> None:
        """Parse the head again without the offer, then the rest."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._hang_up(RequestError("CONNECT is not supported: this server is not a proxy", code="invalid_http"))
            return
        lines = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name not in OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _refuse(self, error: RequestError) -> NoReturn:
        """Stop the parser, from within one of its callbacks."""
        self._refusal = error
        raise error.again()

    def _hang_up(self, error: RequestError) -> None:
        """Respond with an error and close, or, behind a request that has all of its body, close after its response."""
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._ended = True
            cycle.keep_alive = False
            return
        if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
            body = errors.body(error)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request line and headers are larger than {MAX_HEAD >> 10} KiB", code="head_too_large")


# A request's cycle holds its scope and its `send`, so those refer to it weakly.


def _without_chunks(reference: weakref.ref[RequestResponseCycle]) -> Send:
    """`cycle.send` for HTTP/1.0, which has no chunks: closing the connection ends a body of unknown length."""
    unknown = False

    async def plain(message: Message) -> None:
        nonlocal unknown
        cycle = reference()
        assert cycle is not None  # it runs the task that sends
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if unknown else None
        elif unknown:
            cycle.expected_content_length = len(message.get("body", b""))
        await RequestResponseCycle.send(cycle, message)  # type: ignore[arg-type]

    return plain


def _write(reference: weakref.ref[RequestResponseCycle], body: bytes) -> bool:
    """Write part of a body of unknown length without waiting.  False: not written, use `cycle.send`.  Writes the bytes
    that `cycle.send` would write, without the cost of a coroutine, a message and its checks."""
    cycle = reference()
    if cycle is None or cycle.flow.write_paused or not cycle.chunked_encoding:
        return False
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
