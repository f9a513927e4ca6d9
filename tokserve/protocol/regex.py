"""Character classes of regular expressions: what `\\d`, `\\w` and `\\s` stand for.

llguidance interprets them as Unicode classes in regular expressions, and the first two as ASCII in JSON schemas.  They
are replaced by their members, so that they mean the same everywhere.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0B\f\r\x20"}
_UNICODE = {"d": r"\p{Nd}", "w": r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}", "s": r"\p{White_Space}"}


def explicit_classes(pattern: str, *, unicode: bool) -> str:
    """The pattern with the members of its classes in brackets: ASCII's, or with `unicode` those of all scripts.
    Brackets may stand within brackets, so the position of a class does not matter."""
    members = _UNICODE if unicode else _ASCII

    def spelled(escape: re.Match[str]) -> str:
        letter = escape[1]
        if letter.lower() not in members:
            return escape[0]
        return f"[{'^' if letter.isupper() else ''}{members[letter.lower()]}]"

    return _ESCAPE.sub(spelled, pattern)
