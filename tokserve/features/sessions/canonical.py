"""The canonical form of messages: what two messages must share to be the same turn of a conversation.

Clients repeat a conversation in forms of their own: content in parts or as one text, arguments of calls serialized
anew, reasoning dropped.  Two messages with the same form here are the same message.  Nothing raises: rendering says
what is wrong with a message.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tokserve.features.images.parts import UnreadImage

DIGEST = 16  # bytes
EXACT_INTEGERS = 1 << 53  # integers up to here are exact in JavaScript
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # parts that clients may drop
TEXTS = ("text", "refusal")  # names of the text of a part


class PromptContext(msgspec.Struct, frozen=True):
    """What a prompt depends on besides its messages: the model or adapter, digests of the tools and of the template
    with its variables."""

    model: str
    tools: bytes
    template: bytes


def digest(value: Any) -> bytes:
    """A digest of a value that JSON can represent; objects with the same members have the same one."""
    return _hash(_json(value))


def chain(messages: Iterable[Any], start: bytes = b"") -> list[bytes]:
    """A digest for each message, of it and of all before it, which follow the chain that ends with `start`."""
    digests = []
    for message in messages:
        start = _hash(start + canonical(message))
        digests.append(start)
    return digests


def canonical(message: Any) -> bytes:
    """The canonical form of a message."""
    if not isinstance(message, Mapping):
        return _json(["", repr(message)])
    role = message.get("role")
    text = content_text(message.get("content"))
    if role == "assistant":
        text = text.strip()
    calls = message.get("tool_calls")
    listed = [_call(call) for call in calls] if isinstance(calls, list) else []
    if message.get("function_call"):
        listed.append(_function("", message["function_call"]))
    return _json([role, text, listed, message.get("tool_call_id"), message.get("name")])


def content_text(content: Any) -> str:
    """A content as one text, whatever its parts; an image is the digest of its description."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else repr(content)
    return "".join(map(_part, content))


def has_image(message: Any) -> bool:
    """Whether a message has a part that is neither text nor reasoning."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(_part(part).startswith("\0") for part in content)


def _part(part: Any) -> str:
    if isinstance(part, UnreadImage):
        part = part.part
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        if part.get("type") in THOUGHTS:
            return ""
        for name in TEXTS:
            if isinstance(part.get(name), str):
                return str(part[name])
    return "\0" + digest(part).hex()


def _call(call: Any) -> list[Any]:
    if not isinstance(call, Mapping):
        return [repr(call)]
    return _function(call.get("id"), call.get("function"))


def _function(call_id: Any, function: Any) -> list[Any]:
    if not isinstance(function, Mapping):
        return [call_id, repr(function)]
    return [call_id, function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    """The arguments of a call as a JSON value; text that is no JSON stays text."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments.strip()


def _json(value: Any) -> bytes:
    try:
        text = json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr)
    except (RecursionError, TypeError):  # a value that is nested too deeply, or keys that cannot be sorted
        text = secrets.token_hex()  # the same as no other
    return text.encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    """The value with numbers as clients in any language repeat them: 1.0 is 1, and large integers are rounded."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < EXACT_INTEGERS else value
    if isinstance(value, int):
        return value if abs(value) < EXACT_INTEGERS else _rounded(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(inner) for inner in value]
    return value


def _rounded(value: int) -> float | str:
    try:
        return float(value)
    except OverflowError:
        return str(value)


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()
