"""HTTP/1.1 on a connection: uvicorn's, except that nothing is upgraded, that every refusal has our shape, and that
HTTP/1.0 (which nginx speaks to servers, if nothing is said) is not answered in chunks.

Java's HTTP client, for one, offers h2c with every request in clear; the parser takes such a request's body for the
other protocol.  RFC 9110 (7.8) lets a server ignore the offer, so the request is read again without it.
Knows nothing of routes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tokserve.errors import RequestError
from tokserve.server import errors, sse

OFFER = (b"upgrade", b"http2-settings")


class Protocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=Protocol, ws="none")`."""

    def _read(self, received: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(received)
        except httptools.HttpParserUpgrade as offered:
            self._decline(received[offered.args[0] :])
        except httptools.HttpParserError:
            self.logger.info("not HTTP/1.1")
            self.send_400_response("the request is not valid HTTP/1.1")

    data_received = _read  # type: ignore[assignment]  # asyncio's name for it; its argument has another

    def on_headers_complete(self) -> None:
        """Begin the request, unless it offers an upgrade: then it is read again first."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                cycle: Any = self.cycle  # its task has not begun, and takes `send` when it does
                cycle.send = _without_chunks(self.cycle)
            self.scope[sse.WRITE] = partial(_write, self.cycle)  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        """End the request's body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _decline(self, rest: bytes) -> None:
        """Read the head again without the offer, and then what follows it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("CONNECT is for proxies")
            return
        lines = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name not in OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._read(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, and hang up."""
        body = errors.body(RequestError(msg, code="invalid_http"))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[400] + head + body)
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
