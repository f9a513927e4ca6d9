"""The tools of a request to Anthropic's routes: checked, as chat's functions, and which of them the model is shown.

A tool with `defer_loading` is not shown until the conversation refers to it (a `tool_reference` in a tool's result, or
a `tool_addition`).
"""

from __future__ import annotations

from typing import Any

from tokserve.base.errors import LONGEST_SHOWN, RequestError, invalid
from tokserve.server.http import errors


class ToolList:
    """The tools, in the order in which they were given.  Raises RequestError naming a path in `tools`."""

    def __init__(self, tools: list[dict[str, Any]] | None) -> None:
        self._functions: dict[str, dict[str, Any]] = {}
        self._fields: dict[str, str] = {}  # by name, where it is defined
        self._shown: set[str] = set()
        for i, tool in enumerate(tools or ()):
            name = _name(f"tools[{i}]", tool)
            if name in self._functions:
                field = f"tools[{i}].name"
                raise RequestError(f"{field}: two tools have the name {name[:LONGEST_SHOWN]!r}", field=field)
            self._functions[name] = _function(f"tools[{i}]", tool)
            self._fields[name] = f"tools[{i}]"
            if not tool.get("defer_loading"):
                self._shown.add(name)

    def shown(self) -> list[dict[str, Any]] | None:
        """The tools that the model is shown, as chat has them; None if there are none."""
        return [function for name, function in self._functions.items() if name in self._shown] or None

    def shown_fields(self) -> list[str]:
        """Where the tools that are shown are defined."""
        return [field for name, field in self._fields.items() if name in self._shown]

    def define(self, field: str, tool: Any) -> None:
        """Show a tool that is defined within the conversation, at `field`."""
        if not isinstance(tool, dict):
            raise invalid(field, "must be an object")
        name = _name(field, tool)
        self._functions[name] = _function(field, tool)
        self._fields[name] = field
        self._shown.add(name)

    def show(self, field: str, name: Any) -> None:
        """Show a tool that the conversation refers to at `field`."""
        self._shown.add(self._known(field, name))

    def hide(self, field: str, name: Any) -> None:
        self._shown.discard(self._known(field, name))

    def _known(self, field: str, name: Any) -> str:
        if not isinstance(name, str):
            raise invalid(field, "must be a string")
        if name not in self._functions:
            raise RequestError(f"{field}: {name[:LONGEST_SHOWN]!r} is not one of the tools", field=field)
        return name


def _name(field: str, tool: dict[str, Any]) -> str:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        reason = "it has tools with a name and an input_schema, and runs none itself"
        errors.refuse_unsupported(f"{field}.type", kind, reason=reason)
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{field}.name", "must be a string that is not empty")
    return name


def _function(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    schema, description, strict = tool.get("input_schema"), tool.get("description"), tool.get("strict")
    if schema is None:
        raise invalid(f"{field}.input_schema", "is required")
    if not isinstance(schema, dict):
        raise invalid(f"{field}.input_schema", "must be a JSON schema, an object")
    if schema.get("type", "object") != "object":
        raise invalid(f"{field}.input_schema.type", "must be 'object': arguments have names")
    if not isinstance(description, str | None):
        raise invalid(f"{field}.description", "must be a string")
    if not isinstance(strict, bool | None):
        raise invalid(f"{field}.strict", "must be true or false")
    function: dict[str, Any] = {"name": tool["name"]}
    if description is not None:
        function["description"] = description
    function["parameters"] = schema if "type" in schema else {"type": "object", **schema}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}
