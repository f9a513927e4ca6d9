"""Calls of earlier turns as their model writes them, in the text of the turn, for chat templates that show none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokserve.features.chat.output_format import ToolFormat

CONSTANTS = {True: "True", False: "False", None: "None"}  # of Python


def is_written(form: ToolFormat) -> bool:
    """Whether calls of the format can be written here: those that are JSON objects, or in Python's notation."""
    return form.body in ("json", "pythonic") and bool(form.opens)


def with_written_calls(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    """The message with its calls behind its content, if it has any."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    text, content = written(calls, form), message.get("content") or ""
    content = [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def written(calls: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """The text of tool calls, whose arguments are objects, or texts if they are none.  The format `is_written`."""
    write = _call_in_python if form.body == "pythonic" else _json_object
    texts = [write(call["function"], form) for call in calls]
    if form.listed:
        texts = [f"[{', '.join(texts)}]"]
    elif form.grouped:
        texts = ["\n".join(texts)]
    before = "".join(f"{part}\n" for part in form.before)
    after = f"\n{form.after}\n" if form.after else ""
    begin = form.opens[0] + ("\n" if form.after else "")
    return "".join(f"{begin}{before}{text}{after}{form.closes}" for text in texts)


def _json_object(function: Mapping[str, Any], form: ToolFormat) -> str:
    name, arguments = form.keys
    return json.dumps({name: function["name"], arguments: function["arguments"]}, ensure_ascii=False)


def _call_in_python(function: Mapping[str, Any], form: ToolFormat) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return f"{function['name']}({arguments})"
    return f"{function['name']}({', '.join(f'{name}={_literal(value)}' for name, value in arguments.items())})"


def _literal(value: Any) -> str:
    """A value of JSON as a literal of Python."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if value is None or isinstance(value, bool):
        return CONSTANTS[value]
    return json.dumps(value, ensure_ascii=False)
