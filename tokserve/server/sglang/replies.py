"""Reads the bodies of SGLang's control routes, and makes their replies.

Bodies may be absent; names that are not known are ignored and named in X-Ignored-Fields.  Errors are
{"success": false, "message", "error"}, with 400 where SGLang knows no other status.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.errors import RequestError
from tokserve.server.admin.commands import BLANK
from tokserve.server.http import body, errors
from tokserve.server.openai import schemas
from tokserve.server.serving import Serving

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[Serving, Request], Awaitable[Response]]
PLAIN_FAILURES = (409, 502)  # 400 in this dialect


def answered(handler: Handler) -> Handler:
    """The handler, with `RequestError`s as this dialect's replies."""

    @functools.wraps(handler)
    async def answer(serving: Serving, request: Request) -> Response:
        try:
            return await handler(serving, request)
        except RequestError as error:
            failed = {"success": False, "message": error.message} | msgspec.json.decode(errors.body(error))
            status = 400 if error.status in PLAIN_FAILURES else error.status
            return Response(body.encode_json(failed), status_code=status, media_type=body.JSON)

    return answer


async def read(serving: Serving, request: Request, kind: type[T]) -> tuple[T, dict[str, str]]:
    """The parameters from query and body, and the header that names those which were ignored."""
    query = request.query_params
    values: dict[str, Any] = {name: query[name] for name in kind.__struct_encode_fields__ if name in query}
    raw = await serving.bodies.read(request)
    ignored: list[str] = []
    if len(raw) > BLANK or bytes(raw).strip():
        sent = await serving.bodies.decode(request, raw)
        if sent is not None and not isinstance(sent, dict):
            raise RequestError("the body must be an object")
        ignored = [str(name) for name in sent or {} if name not in kind.__struct_encode_fields__]
        values |= {name: value for name, value in (sent or {}).items() if value is not None}
    return body.convert(values, kind, strict=False), schemas.ignored_header(ignored)


def json(value: Any, headers: dict[str, str] | None = None) -> Response:
    """A 200 in JSON."""
    return Response(body.encode_json(value), headers=headers, media_type=body.JSON)
