"""The header X-Request-Id of every reply: the request's own, where the route has not made one of its body."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokserve.server.http.body import is_id

NAME = b"x-request-id"


class RequestIds:
    """Middleware that echoes the id of a request; `makes_ids`: and makes one for a request that has none."""

    def __init__(self, app: ASGIApp, makes_ids: bool) -> None:
        self._app = app
        self._makes_ids = makes_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == NAME), b"")
            if given and is_id(given.decode("latin-1")):
                send = _with_id(send, given)
            elif self._makes_ids:
                send = _with_id(send, secrets.token_hex(16).encode())
        await self._app(scope, receive, send)


def _with_id(send: Send, request_id: bytes) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if all(name.lower() != NAME for name, _ in headers):
                message = {**message, "headers": [*headers, (NAME, request_id)]}
        await send(message)

    return send_with_id
