"""Regular expressions: what `\\d`, `\\w` and `\\s` stand for, and the texts of dates and times.

llguidance interprets them as Unicode classes in regular expressions, and the first two as ASCII in JSON schemas.  They
are replaced by their members, so that they mean the same everywhere.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0B\f\r\x20"}
_UNICODE = {"d": r"\p{Nd}", "w": r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}", "s": r"\p{White_Space}"}

_DAY = "(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:{_DAY})|{_LEAP_YEAR}-02-29)"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOURS})"
# Formats of JSON Schema that llguidance takes too widely: it knows no leap years, and has a second 60 in any minute.
# Leap seconds are left out, because most programs cannot read them.
DATES_AND_TIMES = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_TIME}$", "time": f"^{_TIME}$"}


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
