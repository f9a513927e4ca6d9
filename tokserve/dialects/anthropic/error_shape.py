"""Errors as Anthropic's API has them: {"type": "error", "error": {type, message}}.

Their types follow from the status, as Anthropic's SDK and its users expect.  There is no place for the field at fault,
so every message names it.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.base.errors import RequestError
from tokserve.server.http.errors import ErrorShape

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class UnsupportedThread(msgspec.Struct):
    """What makes Anthropic's SDK send its conversation again, whole: no server state is kept here."""

    error_code: str = "thread_unsupported_request"


class MessagesErrorDetail(msgspec.Struct):
    """Its type in Anthropic's words, and what is wrong.  `details`: where the SDK goes by them."""

    type: str
    message: str
    details: UnsupportedThread | UnsetType = UNSET


class MessagesError(msgspec.Struct, tag_field="type", tag="error"):
    """An error as clients receive it, as a body or as the event `error`."""

    error: MessagesErrorDetail


def encode(error: RequestError) -> bytes:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.field is not None and error.field not in message:
        message = f"{error.field}: {message}"
    details = UnsupportedThread() if error.field == "thread" else UNSET
    return msgspec.json.encode(MessagesError(MessagesErrorDetail(kind, message, details)))


ANTHROPIC = ErrorShape(MessagesError, encode)
