"""An HTTP server that follows a script: each request gets the next answer, and the server keeps what it received."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[str, dict[str, Any]], tuple[int, list[bytes]]]


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


class Scripted:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most = 0
        self.url = ""
        self.facts: dict[str, Any] | None = None  # of /server_info, where there is one

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body))
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most = max(self.most, self.running)
        status, pieces = self.answer(request.path, body)
        reply = web.StreamResponse(status=status)
        await reply.prepare(request)
        for piece in pieces:
            await reply.write(piece)
            await asyncio.sleep(0.001)
        self.running -= 1
        return reply

    async def about(self, _: web.Request) -> web.Response:
        if self.facts is None:
            raise web.HTTPNotFound
        return web.json_response({"facts": self.facts, "config": {}})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})


@contextmanager
def scripted(answer: Answer) -> Iterator[Scripted]:
    server, loop, ready = Scripted(answer), asyncio.new_event_loop(), threading.Event()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/server_info", server.about)
    app.router.add_post("/{rest:.*}", server.handle)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
