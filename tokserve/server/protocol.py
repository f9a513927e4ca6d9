"""HTTP/1.1 on a connection: uvicorn's protocol, with six differences.

No upgrade is accepted, nor another version than 1.0 or 1.1; refusals have our error shape; a request's head is limited
in size and in time; HTTP/1.0 (nginx's default towards upstreams) gets no chunked response; the pieces of a body are
gathered before the application is woken, and many tiny chunks are refused.  Java's HTTP client offers h2c with every
plain request, and the parser would take such a request's body for the other protocol.  RFC 9110 (7.8) lets a server
ignore the offer, so the request is parsed again without it.  Must not know routes.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NoReturn

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tokserve.errors import RequestError
from tokserve.server import client_names, errors, sse

OFFER = (b"upgrade", b"http2-settings")
VERSIONS = ("1.0", "1.1")
GATHERED = 1 << 14  # bytes of a body for which the application is woken
GATHER_SECONDS = 0.005  # the longest that fewer bytes wait
FREE_CHUNKS = 1024  # chunks of a body that may have any size
MIN_CHUNK = 64  # bytes that the chunks of a body with more of them must have on average
MAX_HEAD = 64 << 10  # bytes of a request before its body; one that arrives in one piece may be a little longer


class HeadTooLarge(RequestError):
    """431: the request line and the headers are over the limit."""

    status = 431


class VersionNotSupported(RequestError):
    """505: the request line names a version of HTTP that is not served here."""

    status = 505


class Protocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=Protocol, ws="none")`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: int | None = 0  # bytes so far of an unfinished head, or of trailers; None in a body
        self._refusal: RequestError | None = None  # why the parser was stopped
        self._pieces: list[bytes] = []  # of the body, which the application has not been given
        self._gathered = 0  # their bytes
        self._gathering: asyncio.TimerHandle | None = None
        self._chunks = self._chunked = 0  # of the current body, and their bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timer: it limits the time for the first head, too."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, however the connection was lost."""
        self._give()
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
            invalid = RequestError("the request is not valid HTTP/1.1", code="invalid_http")
            self._hang_up(self._refusal or invalid)
        else:
            if self._head is not None and self._head > MAX_HEAD:
                self._hang_up(HeadTooLarge(f"the headers are larger than {MAX_HEAD >> 10} KiB", code="head_too_large"))

    data_received = _read  # type: ignore[assignment]  # asyncio's name for it; there, the argument is `data`

    def on_headers_complete(self) -> None:
        """Begin the request, unless it offers an upgrade: then it is parsed again first."""
        self._head = None
        self._chunks = self._chunked = 0
        if self.parser.get_http_version() not in VERSIONS:
            self._refuse(VersionNotSupported("this server speaks HTTP/1.1", code="http_version"))
        if not self.parser.should_upgrade():
            self._unset_keepalive_if_required()  # not for part of a head: a client could dribble one forever
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                cycle: Any = self.cycle  # its task has not begun, and takes `send` when it does
                cycle.send = _without_chunks(self.cycle)
            self.scope[client_names.PEER] = self.client and self.client[0]  # type: ignore[literal-required]
            self.scope[sse.WRITE] = partial(_write, self.cycle)  # type: ignore[literal-required]
            self.headers = []  # what comes from here on are trailers, which are not part of the request's headers

    def on_chunk_header(self) -> None:
        """Count again: after the last chunk's header come the trailers.  Each chunk costs the event loop's time."""
        self._head = 0
        self._chunks += 1
        if self._chunks > FREE_CHUNKS and self._chunked < MIN_CHUNK * (self._chunks - 1):
            what = f"the body comes in more than {FREE_CHUNKS} chunks of fewer than {MIN_CHUNK} bytes on average"
            self._refuse(RequestError(what, code="small_chunks"))

    def on_body(self, body: bytes) -> None:
        """Part of the body: gather it with others."""
        self._head = None
        self._chunked += len(body)
        self._pieces.append(body)
        self._gathered += len(body)
        if self._gathered >= GATHERED:
            self._give()
        elif self._gathering is None:
            self._gathering = self.loop.call_later(GATHER_SECONDS, self._give)

    def _give(self) -> None:
        """Give the application what has been gathered."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._pieces:
            pieces, self._pieces, self._gathered = self._pieces, [], 0
            super().on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def on_message_complete(self) -> None:
        """End the request's body."""
        self._give()
        self._head = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline(self, rest: bytes) -> None:
        """Parse the head again without the offer, and then what follows it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._hang_up(RequestError("CONNECT is for proxies", code="invalid_http"))
            return
        lines = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name not in OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._read(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _refuse(self, error: RequestError) -> NoReturn:
        """Stop the parser, which calls this."""
        self._refusal = error
        raise error

    def _hang_up(self, error: RequestError) -> None:
        """Refuse what is not a valid request, and close; never inside or in place of another request's response."""
        cycle = self.cycle
        broken = cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline
        if cycle is None or cycle.response_complete or broken:
            body = errors.body(error)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def _without_chunks(cycle: RequestResponseCycle) -> Send:
    """`cycle.send` for HTTP/1.0, which has no chunks: the end of the connection ends a body of unknown length."""
    send = cycle.send
    unknown = False

    async def plain(message: Message) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if unknown else None
        elif unknown:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return plain


def _write(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write part of a body of unknown length at once.  False: use `cycle.send`, which can wait.

    Writes the bytes that `cycle.send` would write, without the cost of a coroutine, a message and its checks.
    """
    if cycle.flow.write_paused or not cycle.chunked_encoding:
        return False
    if not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
