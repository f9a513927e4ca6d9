"""Errors as responses, in one JSON shape: {"error": {message, type, param, code}}, or a route's own.

Turns the validation errors of msgspec and pydantic into `RequestError`s that name the field as a client writes it
(`messages[0].content`, `sampling_params.top_p`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from tokserve.base.errors import LONGEST_SHOWN, RequestError, invalid, invalid_value, violation
from tokserve.server.http.json_faults import find_fault

_INSTANCE = re.compile(r"dictionary or instance of \w+|dictionary")


class WrongMethod(RequestError):
    """405: the route exists, the method does not."""

    status = 405


class Detail(msgspec.Struct):
    """The fields of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """An error as clients receive it."""

    error: Detail


def detail(error: RequestError) -> Detail:
    return Detail(error.message, error.type, error.field, error.code)


def body(error: RequestError) -> bytes:
    return msgspec.json.encode(ErrorBody(detail(error)))


class ErrorShape(NamedTuple):
    """The JSON shape of a route's errors: its struct, for the OpenAPI document, and what encodes an error.

    `plain`: statuses that are 400 in this shape.
    """

    struct: type[msgspec.Struct]
    encode: Callable[[RequestError], bytes]
    plain: frozenset[int] = frozenset()

    def status_of(self, status: int) -> int:
        """The status that an error with this one has here."""
        return 400 if status in self.plain else status


OPENAI = ErrorShape(ErrorBody, body)


def response(error: RequestError, headers: Mapping[str, str] | None = None, shape: ErrorShape = OPENAI) -> Response:
    """The error as an HTTP response, with `Retry-After` where trying again makes sense."""
    extra = {**error.headers, **(headers or {})}
    if error.retry_after is not None:
        extra["Retry-After"] = str(error.retry_after)
    if error.status == 408:  # the rest of the body would be read as the next request
        extra["Connection"] = "close"
    return Response(
        shape.encode(error), status_code=shape.status_of(error.status), headers=extra, media_type="application/json"
    )


def renamed(error: RequestError, field: str) -> RequestError:
    """The same error about `field`, which is the field's path in another body; so is the start of its message."""
    if error.field is not None and not error.has_final_path:
        error.rename_field(field)
    return error


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Name fields of another body, the keys of `names`, as the client wrote them."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, names.get(error.field or "", error.field or "")) from None


def malformed(error: Exception, kind: str, raw: bytes | bytearray | memoryview = b"", prefix: str = "") -> RequestError:
    """The error of a body that is not valid JSON (or msgpack); the message says where it breaks.  `raw`: the body, if
    it is JSON, or what its field `prefix` holds."""
    if fault := find_fault(raw):
        field = ".".join(part for part in (prefix, fault.path) if part)[:LONGEST_SHOWN]
        return RequestError(f"{field or 'the body'}: {fault.reason}", field=field or None, code="invalid_body")
    if isinstance(error, RecursionError):
        return RequestError(f"the body is nested too deeply for {kind}", code="invalid_body")
    if isinstance(error, UnicodeDecodeError):
        return RequestError("the body holds a string that is not UTF-8", code="invalid_body")
    why = str(error).partition(" is malformed: ")[2] or str(error).partition(" - at ")[0]
    return RequestError(f"the body is not valid {kind}: {why}", code="invalid_body")


def from_msgspec(error: msgspec.ValidationError, known: Iterable[str], prefix: str = "") -> RequestError:
    """The error of a well-formed body with a wrong value, with the value's path.  `known`: the struct's field names, to
    suggest one for an unknown name.  `prefix`: the struct's path in the body."""
    field, what, name = violation(error, prefix)
    if name is not None and "unknown" in what:
        return unknown_field(field, name, known)
    return invalid_value(error, prefix)


def unknown_field(path: str, name: str, known: Iterable[str]) -> RequestError:
    """The error of an unknown field; the message suggests the path where the name is known, or a similar name.
    `known`: names; dotted names are paths of fields elsewhere in the body."""
    known = list(known)
    suggestions = [entry for entry in known if entry.rpartition(".")[2] == name and entry != path]
    suggestions = suggestions or difflib.get_close_matches(name[:LONGEST_SHOWN], [k for k in known if "." not in k], 1)
    hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
    return RequestError(
        f"unknown field {path[:LONGEST_SHOWN]!r}{hint}", field=path[:LONGEST_SHOWN], code="unknown_field"
    )


def refuse_unsupported(field: str, value: Any, no_effect: Iterable[Any] = (), reason: str = "") -> None:
    """Raise for a field that other servers know, unless its value has no effect: null, or one of `no_effect`."""
    if value is not None and (type(value), value) not in [(type(allowed), allowed) for allowed in no_effect]:
        because = f": {reason}" if reason else ""
        raise invalid(field, f"is not supported by this server{because}", code="unsupported")


def from_pydantic(error: ValidationError, value: Any) -> RequestError:
    """The error with the longest path into `value`; for a union, with every form that is allowed there."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    depth = max(len(detail["loc"]) for detail in details)
    deepest = [detail for detail in details if len(detail["loc"]) == depth]
    first = deepest[0]
    field = _path(first, value)[:LONGEST_SHOWN]
    if first["type"] == "missing" or _is_null_field(first, value):
        return RequestError(f"{field} is required", field=field)
    if not field:
        return RequestError("the body must be an object")
    branches = [detail["msg"] for detail in deepest if _path(detail, value) == field]
    messages = [branches[0][0].lower() + branches[0][1:], *(m.removeprefix("Input should be ") for m in branches[1:])]
    what = _INSTANCE.sub("object", " or ".join(dict.fromkeys(messages)))
    return RequestError(f"{field}: {what}", field=field)


def _is_null_field(detail: Any, value: Any) -> bool:
    """Whether the complaint is about a name in an object that has null, where that is not allowed."""
    location = detail["loc"]
    try:
        for part in location:
            value = value[part]
    except (KeyError, IndexError, TypeError):  # a branch's name
        return False
    return value is None and bool(location) and isinstance(location[-1], str)


def _path(detail: Any, value: Any) -> str:
    """The complaint's place in `value` as `a.b[0].c`, without the names of union branches, which pydantic inserts."""
    path = ""
    location = detail["loc"]
    for position, part in enumerate(location):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):  # a branch's name, or (at the end) a field that is missing
            if detail["type"] != "missing" or position != len(location) - 1:
                continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
