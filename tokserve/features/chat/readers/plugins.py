"""Formats of tool calls and reasoning that another package brings: the entry points `tokserve.tool_parsers`.

Code of another package is loaded only if the operator names its entry point (`--tool-parser-plugin`).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from tokserve.base.errors import StartError
from tokserve.features.chat.output_format import Thinking, ToolFormat

GROUP = "tokserve.tool_parsers"
OPTION = "option tool_parser_plugin"


class Rows(NamedTuple):
    """Formats of tool calls and of reasoning."""

    tools: tuple[ToolFormat, ...] = ()
    thinking: tuple[Thinking, ...] = ()


def load_plugin(name: str | None) -> Rows:
    """The formats that the entry point of this name holds; None: none.  Raises StartError if there is no such entry
    point, if it cannot be loaded, and if it is neither a format nor a list of formats."""
    if name is None:
        return Rows()
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise StartError(f"{OPTION}: no installed package has an entry point {name!r} of {GROUP}; there are: {names}")
    value = _loaded(known[name])
    rows = list(value) if isinstance(value, list | tuple) else [value]
    for row in rows:
        if not isinstance(row, ToolFormat | Thinking):
            raise StartError(
                f"{OPTION}: {known[name].value} must be a ToolFormat, a Thinking or a list of these, and holds "
                f"{type(row).__name__}"
            )
    tools = tuple(row for row in rows if isinstance(row, ToolFormat))
    return Rows(tools, tuple(row for row in rows if isinstance(row, Thinking)))


def _loaded(point: EntryPoint) -> object:
    try:
        value: object = point.load()
    except (ImportError, AttributeError) as error:
        raise StartError(f"{OPTION}: {point.value} cannot be loaded: {error}") from error
    return value
