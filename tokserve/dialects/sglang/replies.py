"""Reads the bodies of SGLang's control routes, and makes their replies.

Bodies may be absent; names that are not known are ignored and named in X-Ignored-Fields.  Errors are
{"success": false, "message", "error"}, with 400 where SGLang knows no other status; those of /generate have the status
as their code.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError
from tokserve.server.admin.commands import query_and_body
from tokserve.server.http import body, errors
from tokserve.server.route_call import ignored_header
from tokserve.server.serving import Serving

T = TypeVar("T", bound=msgspec.Struct)


class SglangError(msgspec.Struct):
    """An error as clients of SGLang's control routes receive it."""

    success: bool
    message: str
    error: errors.Detail


def encode(error: RequestError) -> bytes:
    return msgspec.json.encode(SglangError(False, error.message, errors.detail(error)))


class GenerateDetail(msgspec.Struct):
    """The fields of an error of /generate: those that SGLang's contract names, and `param`."""

    message: str
    type: str
    param: str | None
    code: int


class GenerateError(msgspec.Struct):
    """An error as clients of /generate receive it."""

    error: GenerateDetail


def encode_generate(error: RequestError) -> bytes:
    return msgspec.json.encode(GenerateError(GenerateDetail(error.message, error.type, error.field, error.status)))


GENERATE = errors.ErrorShape(GenerateError, encode_generate)
SGLANG = errors.ErrorShape(SglangError, encode, plain=frozenset({409, 502}))


async def read_body(serving: Serving, request: Request, kind: type[T]) -> tuple[T, dict[str, str]]:
    """The parameters from query and body, and the header that names those which were ignored.

    Texts of the body are converted too: SGLang's trainers send ports as texts.
    """
    query, sent, _ = await query_and_body(serving, request, kind)
    ignored = [str(name) for name in sent if name not in kind.__struct_encode_fields__]
    values = {name: value for name, value in sent.items() if value is not None}
    return body.convert(query | values, kind, strict=False), ignored_header(ignored)


def json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(body.encode_json(value), headers=headers, media_type=body.JSON)
