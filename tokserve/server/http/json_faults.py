"""Values that JSON does not have but JSON libraries write: NaN, infinities, half of a surrogate pair.

msgspec refuses a body with one as a whole; this finds the value's path, so that the error names the field.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

MAX_BYTES = 1 << 18  # of bodies that are read again for this; a larger one would block the event loop


class Fault(NamedTuple):
    """A value that JSON does not have: its path in the body, and what is wrong with it."""

    path: str
    reason: str


class _NotJson(NamedTuple):
    """Stands for a number in the body that JSON does not have."""

    text: str


def find_fault(raw: bytes | bytearray | memoryview) -> Fault | None:
    """The first such value of a body that is valid JSON but for them."""
    if len(raw) > MAX_BYTES:
        return None
    try:
        value = json.loads(bytes(raw), parse_constant=_NotJson, parse_float=_float)
    except (ValueError, RecursionError):
        return None
    return _first_fault(value)


def _float(text: str) -> float | _NotJson:
    number = float(text)
    return number if math.isfinite(number) else _NotJson(text)


def _first_fault(body: Any) -> Fault | None:
    pending: list[tuple[str, Any]] = [("", body)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, _NotJson):
            reason = "is out of range" if value.text[-1].isdigit() else "is not valid JSON"
            return Fault(path, f"{value.text[:20]} {reason}")
        if isinstance(value, str) and not _is_text(value):
            return Fault(path, "the string has half of a surrogate pair, which is not a character")
        if isinstance(value, dict):
            if not all(map(_is_text, value)):
                return Fault(path, "a name has half of a surrogate pair, which is not a character")
            pending.extend((f"{path}.{name}" if path else name, entry) for name, entry in reversed(value.items()))
        elif isinstance(value, list):
            pending.extend((f"{path}[{index}]", value[index]) for index in reversed(range(len(value))))
    return None


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
