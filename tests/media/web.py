"""A web server on this machine for tests of fetching: each path has its handler, and requests are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class Web(ThreadingHTTPServer):
    """`answers`: by path; `seen`: (path, Host header) of each request."""

    daemon_threads = True

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.seen: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def url(self, path: str, host: str | None = None) -> str:
        return f"http://{host or self.host}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Host"]))
        try:
            self.server.answers[self.path](self)
        except OSError:  # the client has gone
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_server() -> Iterator[Web]:
    server = Web()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def content(body: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def redirect(location: str, status: int = 302) -> Answer:
    return content(b"", status, Location=location)
