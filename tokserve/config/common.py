"""What the groups of options share: ranges, units, and the sentence of a field."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

GIB = 1 << 30
FOR_EVER = 1e9  # seconds, thirty years: the longest timeout that all clocks accept
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


def about(text: str, **limits: Any) -> Meta:
    """The field's sentence for --help, and its range."""
    return Meta(description=text, **limits)
