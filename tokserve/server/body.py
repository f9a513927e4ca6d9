"""Reading a request's body and writing a reply's: the size limit, the content type, JSON or msgpack.

Every POST route comes through here, so limits and refusals are the same everywhere.  What the values mean
is the routes' business.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.errors import RequestError, TooLarge
from tokserve.server import errors

S = TypeVar("S", bound=msgspec.Struct)
JSON = "application/json"
MSGPACK = "application/msgpack"
_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
_Q = re.compile(r"[01](\.[0-9]{0,3})?")
MAX_ID = 256

encode_json = msgspec.json.Encoder().encode
encode_msgpack = msgspec.msgpack.Encoder().encode


class Gone(Exception):
    """The client has left; nobody reads the answer."""


async def read(request: Request, limit: int) -> bytes:
    """The whole body.  Raises `TooLarge` as soon as it is known to have more than `limit` bytes."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            f"the body is encoded with {encoding[: errors.SHOWN]!r} (Content-Encoding); send it as it is",
            code="content_encoding",
        )
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Gone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit >> 20} MiB (--max-body-mb)", code="body_too_large")


def is_msgpack(request: Request) -> bool:
    """Whether the body is msgpack; a content type other than JSON or msgpack is refused, none at all is JSON."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind == JSON or (kind.startswith("application/") and kind.endswith("+json")):
        return False
    if kind in _MSGPACK_NAMES:
        return True
    raise RequestError(f"the content type must be {JSON} or {MSGPACK}", code="content_type")


def wants_msgpack(request: Request) -> bool:
    """Whether the client asked for a msgpack reply, and not rather for JSON."""
    accept = request.headers.get("accept", "").lower()
    if "msgpack" not in accept:
        return False
    weights = dict(map(_weight, accept.split(",")))
    packed = max(weights.get(name, 0.0) for name in _MSGPACK_NAMES)
    return packed > 0.0 and packed >= weights.get(JSON, 0.0)


def _weight(part: str) -> tuple[str, float]:
    """A media type of an Accept header and its q (RFC 9110, 12.4.2); what is no number counts as 1."""
    kind, *parameters = (word.strip() for word in part.split(";"))
    said = next((word[2:].strip() for word in parameters if word.startswith("q=")), "")
    return kind, float(said) if _Q.fullmatch(said) else 1.0


def decode(raw: bytes, packed: bool) -> Any:
    """The body as dictionaries and lists."""
    try:
        return msgspec.msgpack.decode(raw) if packed else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise errors.malformed(error, "msgpack" if packed else "JSON") from None


async def load(request: Request, limit: int) -> tuple[Any, int]:
    """The whole body as dictionaries and lists, by its content type, and its size in bytes."""
    packed = is_msgpack(request)
    raw = await read(request, limit)
    return decode(raw, packed), len(raw)


def convert(
    value: Any, kind: type[S], field: str = "", *, known: Iterable[str] | None = None, strict: bool = True
) -> S:
    """Decoded `value`, which is `field` of the body, as a struct.  Raises `RequestError` naming the value at fault.

    `known`: the names to suggest for an unknown one; default: those of `kind`.
    """
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise errors.from_msgspec(error, kind.__struct_fields__ if known is None else known, field) from None


def unpack_ids(packed: bytes, field: str) -> list[int]:
    """Token ids from little-endian int32 bytes.  Raises `RequestError` for a length that is no multiple of 4."""
    if len(packed) % 4:
        raise RequestError(f"{field} must be int32 values, 4 bytes each, got {len(packed)} bytes", field=field)
    return array("i", packed).tolist()


def reply(request: Request, value: Any, headers: dict[str, str] | None = None) -> Response:
    """A 200 with `value` in the format the client asked for."""
    if wants_msgpack(request):
        return Response(encode_msgpack(value), headers=headers, media_type=MSGPACK)
    return Response(encode_json(value), headers=headers, media_type=JSON)


def request_id(request: Request, given: str | None) -> str | None:
    """The client's own id: the X-Request-Id header or the body's field; both and different is refused."""
    header = request.headers.get("x-request-id")
    if header and given and header != given:
        raise RequestError("request_id differs from the X-Request-Id header; send one of them", field="request_id")
    chosen = header or given
    if chosen is not None and not (0 < len(chosen) <= MAX_ID and chosen.isascii() and chosen.isprintable()):
        raise RequestError(f"request_id must be 1 to {MAX_ID} printable ASCII characters", field="request_id")
    return chosen
