"""All errors that clients and operators can get, with their HTTP status.

A `RequestError` belongs to one request and becomes its response (`server/http/errors`).  A `StartError` stops a
process from starting and is printed without a traceback.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import NamedTuple, Self

LONGEST_SHOWN = 200  # characters of a client's text that an error repeats at most
_VALIDATION = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"(?:unknown|missing required) field `(?P<name>.*)`", re.DOTALL)


def sendable(text: str) -> str:
    """`text` with lone surrogates escaped: file names may hold some, and UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode()


class RequestError(ValueError):
    """A request cannot be served.  `field` is the JSON path of the offending value, if there is one.  `has_final_path`:
    the path is one of the body that the client sent, even where a route makes another body of it.  A ValueError, as
    vLLM's errors of this kind are."""

    status = 400
    type = "invalid_request_error"
    has_final_path = False
    retry_after: int | None = None  # seconds after which the same request may be served
    headers: Mapping[str, str] = {}  # of the response

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        self.message = sendable(message)
        super().__init__(self.message)
        self.field = field
        self.code = code

    def rename_field(self, field: str) -> None:
        """Name the same value by its path in another body, also at the start of the message."""
        if self.field is not None and self.message.startswith(self.field):
            self.message = field + self.message[len(self.field) :]
        self.field = field

    def again(self) -> Self:
        """A copy to raise where the error itself is kept: raised, it refers to frames, and they may refer to it."""
        return copy.copy(self)


def invalid(field: str, rule: str, *, code: str | None = None) -> RequestError:
    """The error of a value: the path of its field, and the rule that it breaks ("must be ...")."""
    return RequestError(f"{field} {rule}", field=field, code=code)


class Violation(NamedTuple):
    """What msgspec says about a value: its path in the body, what is wrong, the name of a missing or unknown field."""

    field: str
    what: str
    name: str | None


def violation(error: Exception, prefix: str = "") -> Violation:
    """The parts of a `msgspec.ValidationError` about what the body holds at `prefix`."""
    match = _VALIDATION.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    named = _NAMED.search(what)
    parts = [prefix, path.lstrip("."), named["name"] if named else ""]
    field = ".".join(part for part in parts if part).replace(".[", "[")[:LONGEST_SHOWN]
    return Violation(field, what, named["name"] if named else None)


def invalid_value(error: Exception, prefix: str = "") -> RequestError:
    """The same as an error of the request."""
    field, what, name = violation(error, prefix)
    if name is not None and "unknown" in what:
        return RequestError(f"unknown field {field!r}", field=field, code="unknown_field")
    if name is not None:
        return RequestError(f"{field} is required", field=field)
    return RequestError(f"{field or 'the body'}: {what[0].lower()}{what[1 : 2 * LONGEST_SHOWN]}", field=field or None)


def mistyped(error: Exception, prefix: str = "") -> RequestError:
    """The error of a value of the wrong type, by msgspec's message; the path leaves out keys, which msgspec does not
    name."""
    path, what, _ = violation(error, prefix)
    field = path.replace("[...]", "")
    return RequestError(f"{field}: {what}" if field else what, field=field or None)


class Unauthorized(RequestError):
    """401: the API key is missing or wrong."""

    status = 401
    type = "authentication_error"


class NotFound(RequestError):
    """404: unknown model or route."""

    status = 404
    type = "not_found_error"


class Forbidden(RequestError):
    """403: the caller is not allowed to do that."""

    status = 403
    type = "permission_error"


class Conflict(RequestError):
    """409: the id is in use, or the state does not allow the call."""

    status = 409
    type = "conflict_error"


class TooLarge(RequestError):
    """413: the body is over the limit."""

    status = 413


class UnsupportedMedia(RequestError):
    """415: the body has a type or an encoding that is not read here; `headers` say which are (RFC 9110, 15.5.16)."""

    status = 415

    def __init__(self, message: str, *, code: str, headers: Mapping[str, str]) -> None:
        super().__init__(message, code=code)
        self.headers = headers


class TimedOut(RequestError):
    """408: the body did not arrive; the connection is closed."""

    status = 408


class Overloaded(RequestError):
    """503: a queue is full or the server is stopping; try again after `retry_after` seconds."""

    status = 503
    type = "overloaded_error"

    def __init__(self, message: str, *, retry_after: int = 1, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class QueueFull(Overloaded):
    """429: the queue, or the client, has reached its limit of requests; nothing of this request is kept.  `limit`: the
    option that sets the limit of the queue, or ""."""

    status = 429
    limit = ""


class Unavailable(RequestError):
    """503: the weights cannot serve until an operator or a trainer updates them."""

    status = 503
    type = "unavailable_error"


class TransferFailed(RequestError):
    """502: tensors did not arrive as announced, or their sender has disconnected."""

    status = 502
    type = "transfer_error"


class FetchRefused(RequestError):
    """422: what a URL of the request names is not to be had: its host says so."""

    status = 422


class FetchFailed(RequestError):
    """502: the host of a URL of the request does not answer, or not in time, or fails."""

    status = 502
    type = "fetch_error"


class RequestFailed(RequestError):
    """500: the engine ended this request with an error; other requests are not affected."""

    status = 500
    type = "internal_error"


class EngineDead(RequestError):
    """503: the engine process is gone or does not answer.  `message` is for clients, `private` for the log.  With
    `retry_after` (seconds), another engine is being started, which can serve the same request."""

    status = 503
    type = "engine_dead_error"

    def __init__(
        self,
        message: str = "the engine is not running",
        *,
        private: str = "",
        code: str = "engine_dead",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.private = private
        self.retry_after = retry_after


_KINDS = (RequestError, Forbidden, NotFound, Conflict, TransferFailed, Unavailable, RequestFailed)
BY_STATUS: dict[int, type[RequestError]] = {
    kind.status: kind for kind in _KINDS
}  # errors that the engine sends to front ends

REFUSALS = (  # codes of a `SubmitReply` that refuses a submission
    "duplicate_id",
    "queue_full",
    "draining",
    "paused",
    "quarantined",
    "model_not_found",
    "invalid",
    "internal",
    "client_limit",
)


def refused(refusal: str, message: str, retry_after: int = 1, field: str = "") -> RequestError:
    """The error of a request that the engine refused; `field`: the sampling parameter at fault, the option whose limit
    is reached, or ""."""
    if refusal == "duplicate_id":
        return Conflict(message, field="request_id", code=refusal)
    if refusal in ("queue_full", "client_limit"):
        full = QueueFull(message, retry_after=retry_after, code=refusal)
        full.limit = field
        return full
    if refusal in ("draining", "paused"):
        return Overloaded(message, retry_after=retry_after, code=refusal)
    if refusal == "model_not_found":
        return NotFound(message, field="model", code=refusal)
    if refusal == "quarantined":
        return Unavailable(message, code=refusal)
    return RequestFailed(message) if refusal == "internal" else RequestError(message, field=field or None)


class DeviceLost(RuntimeError):
    """What computes for the engine is gone: a rank has ended."""


class StartError(Exception):
    """The server cannot start with this configuration, checkpoint or machine."""

    def __init__(self, message: str) -> None:
        super().__init__(sendable(message))


class NotBuiltIn(StartError):
    """The model's own arithmetic is not built in; transformers' module may compute it."""
