"""Classes of characters in regular expressions, spelled out."""

from __future__ import annotations

import pytest

from tokserve.protocol.regex import explicit_classes


@pytest.mark.parametrize(
    ("pattern", "ascii_only", "unicode"),
    [
        (r"\d+", "[0-9]+", r"[\p{Nd}]+"),
        (r"\D", "[^0-9]", r"[^\p{Nd}]"),
        (r"[\w.]", "[[0-9A-Za-z_].]", r"[[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}].]"),
        (r"[^\s]", r"[^[\t\n\x0B\f\r\x20]]", r"[^[\p{White_Space}]]"),
        (r"\\d\\\d", r"\\d\\[0-9]", r"\\d\\[\p{Nd}]"),  # a backslash before a letter is no class
        (r"\p{Nd}\.\bd\n", r"\p{Nd}\.\bd\n", r"\p{Nd}\.\bd\n"),
        ("\\", "\\", "\\"),
    ],
)
def test_classes_are_spelled_out(pattern: str, ascii_only: str, unicode: str) -> None:
    assert explicit_classes(pattern, unicode=False) == ascii_only
    assert explicit_classes(pattern, unicode=True) == unicode
    assert explicit_classes(ascii_only, unicode=True) == ascii_only
