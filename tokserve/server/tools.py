"""Tools in a chat body: the chat template shows them to the model, and nothing reads calls out of its answer.

So they are taken if the client wants no calls, and refused if it waits for some.  What the model is shown of them, and
whether its template knows of tools at all, is the template's business.
"""

from __future__ import annotations

from typing import Any

from tokserve.errors import RequestError
from tokserve.server import errors

NO_CALLS = (
    "tool calls are not supported by this server: tools are shown to the model, but its answer is not searched for "
    'calls (send tool_choice "none" for that, and read them out of the text)'
)


def check(tools: list[dict[str, Any]] | None, choice: Any) -> None:
    """Refuse tools whose calls would have to be read, and tools without a name.  `choice`: the body's tool_choice."""
    if not tools:
        errors.refuse_unsupported("tool_choice", choice, ("none", "auto"))
    elif choice != "none":
        field = "tools" if choice is None else "tool_choice"
        raise RequestError(f"{field}: {NO_CALLS}", field=field, code="unsupported")
    check_shape(tools or [])


def check_shape(tools: list[dict[str, Any]]) -> None:
    """Refuse what is no function with a name."""
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise RequestError(f"tools[{i}].type must be 'function'", field=f"tools[{i}].type")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}].function.name must be a string", field=f"tools[{i}].function.name")
