"""A relay between an agent and a server: passes requests on and answers back as they come, and remembers both."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

NOT_PASSED = ("host", "connection", "accept-encoding", "content-length", "transfer-encoding")


class Exchange(NamedTuple):
    """A request and its answer.  `headers`: of the request, in lower case; `ignored`: the fields in X-Ignored-Fields;
    `num_pieces`: in how many pieces the answer came."""

    path: str
    headers: dict[str, str]
    body: Any
    status: int
    ignored: list[str]
    num_pieces: int


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream = ""
    exchanges: list[Exchange]

    def do_POST(self) -> None:
        """Pass on, and remember."""
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED}
        connection = http.client.HTTPConnection(self.upstream)
        connection.request(self.command, self.path, raw, headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in NOT_PASSED:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        num_pieces = 0
        while piece := answer.read1(1 << 16):
            num_pieces += 1
            self.wfile.write(piece)
        ignored = answer.getheader("x-ignored-fields") or ""
        self.exchanges.append(
            Exchange(
                urlsplit(self.path).path,
                {name.lower(): value for name, value in self.headers.items()},
                json.loads(raw) if raw else None,
                answer.status,
                ignored.split(", ") if ignored else [],
                num_pieces,
            )
        )
        connection.close()

    do_GET = do_POST
    do_HEAD = do_POST

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class _Relay(ThreadingHTTPServer):
    daemon_threads = True


@contextmanager
def relay(url: str) -> Iterator[tuple[str, list[Exchange]]]:
    """The address of a relay to the server at `url`, and the exchanges so far, in the order of their ends."""
    exchanges: list[Exchange] = []
    handler = type("Handler", (_Handler,), {"upstream": urlsplit(url).netloc, "exchanges": exchanges})
    with _Relay(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", exchanges
        server.shutdown()
