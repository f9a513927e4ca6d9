"""Request bodies in, reply bodies out: content types, JSON or msgpack.  `bodies` receives and bounds them."""

from __future__ import annotations

import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import LONGEST_SHOWN, RequestError, UnsupportedMedia
from tokserve.server.http import errors

S = TypeVar("S", bound=msgspec.Struct)
JSON = "application/json"
MSGPACK = "application/msgpack"
_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
FEW = 64  # bytes of a body that may be nothing but white space
_Q = re.compile(r"[01](\.[0-9]{0,3})?")
RANK_HEADER = "X-data-parallel-rank"
MAX_ID = 256

encode_json = msgspec.json.Encoder().encode
encode_msgpack = msgspec.msgpack.Encoder().encode


def is_msgpack(request: Request) -> bool:
    """Whether the body is msgpack, not JSON (the default).  Raises `UnsupportedMedia` for other content types.

    From a web page a content type is required: browsers ask a server before they send one of these to it, but would
    send a body without one on behalf of any page.
    """
    if "origin" in request.headers and "content-type" not in request.headers:
        raise _unsupported_type("a web page must send a Content-Type")
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind == JSON or (kind.startswith("application/") and kind.endswith("+json")):
        return False
    if kind in _MSGPACK_NAMES:
        return True
    shown = kind[:LONGEST_SHOWN] if kind else "none"
    raise _unsupported_type(f"the content type must be {JSON} or {MSGPACK}, got {shown!r}")


def _unsupported_type(message: str) -> UnsupportedMedia:
    return UnsupportedMedia(message, code="content_type", headers={"Accept": f"{JSON}, {MSGPACK}"})


def wants_msgpack(request: Request) -> bool:
    """Whether the client accepts msgpack, and prefers it to JSON."""
    accept = request.headers.get("accept", "").lower()
    if "msgpack" not in accept:
        return False
    weights = dict(map(_weight, accept.split(",")))
    packed = max(weights.get(name, 0.0) for name in _MSGPACK_NAMES)
    return packed > 0.0 and packed >= weights.get(JSON, 0.0)


def _weight(part: str) -> tuple[str, float]:
    """A media type of an Accept header and its q (RFC 9110, 12.4.2); a malformed q counts as 1."""
    kind, *parameters = (word.strip() for word in part.split(";"))
    quality = next((word[2:].strip() for word in parameters if word.startswith("q=")), "")
    return kind, float(quality) if _Q.fullmatch(quality) else 1.0


def decode(raw: bytes | bytearray | memoryview, packed: bool, field: str = "") -> Any:
    """The body, or what its `field` holds, as dictionaries and lists."""
    try:
        return msgspec.msgpack.decode(raw) if packed else msgspec.json.decode(without_mark(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise malformed(error, raw, packed, field) from None


def without_mark(json: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    """The text without a byte order mark, which some clients write before it (RFC 8259, 8.1)."""
    return memoryview(json)[len(BOM_UTF8) :] if json[: len(BOM_UTF8)] == BOM_UTF8 else json


def malformed(error: Exception, raw: bytes | bytearray | memoryview, packed: bool, field: str = "") -> RequestError:
    """The error of a body, or of what its `field` holds, that is not valid msgpack or JSON."""
    if len(raw) < FEW and not bytes(raw).strip():
        return RequestError(f"{field or 'the body'} is empty", field=field or None, code="invalid_body")
    return errors.malformed(error, "msgpack") if packed else errors.malformed(error, "JSON", without_mark(raw), field)


def convert(
    value: Any, kind: type[S], field: str = "", *, known: Iterable[str] | None = None, strict: bool = True
) -> S:
    """Decoded `value`, which is `field` of the body, as a struct.  Raises `RequestError` naming the value at fault.
    `known`: the names to suggest for an unknown one; default: those of `kind`."""
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
    """A 200 with `value` in the format that the client accepts."""
    if wants_msgpack(request):
        return Response(encode_msgpack(value), headers=headers, media_type=MSGPACK)
    return Response(encode_json(value), headers=headers, media_type=JSON)


def given_rank(request: Request, rank: int | None) -> int | None:
    """The engine that the client chose, by the X-data-parallel-rank header or the body (`rank`).  Raises if they
    differ, or if the header is no number."""
    header = request.headers.get(RANK_HEADER)
    if header is None:
        return rank
    if not (header.isascii() and header.isdigit() and len(header) < 10):
        raise RequestError(f"{RANK_HEADER} must be the number of an engine, from 0", field=RANK_HEADER)
    if rank not in (None, int(header)):
        raise RequestError(
            f"data_parallel_rank differs from the header {RANK_HEADER}; send one of them", field="data_parallel_rank"
        )
    return int(header)


RENDERED = "rendered-"  # begins the ids that render makes


def given_request_id(request: Request, request_id: str | None, *, header_wins: bool = False) -> str | None:
    """The client's own id, from the X-Request-Id header or the body (`request_id`).  Raises if they differ, unless
    `header_wins`, or it is no id."""
    header = request.headers.get("x-request-id")
    if header and request_id and header != request_id and not header_wins:
        raise RequestError("request_id differs from the X-Request-Id header; send one of them", field="request_id")
    chosen = header or request_id
    if chosen is not None and not is_id(chosen):
        raise RequestError(f"request_id must be 1 to {MAX_ID} printable ASCII characters", field="request_id")
    return chosen


def is_id(text: str) -> bool:
    """Whether a request may have this id."""
    return 0 < len(text) <= MAX_ID and text.isascii() and text.isprintable()
