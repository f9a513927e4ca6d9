"""Messages as older or other clients send them, in the form that templates take: calls and results in the form before
tools, marks of a message that is to be continued, empty fields that mean none, system messages in several places."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tokserve.base.errors import invalid

Message = Mapping[str, Any]
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
PREFIX = "prefix"  # Mistral's and DeepSeek's mark of a final message that the answer continues


def is_continued(messages: Sequence[Message]) -> bool:
    """Whether the final message is marked as the beginning of the answer.  Raises RequestError for a mark elsewhere."""
    for index, message in enumerate(messages):
        mark = message.get(PREFIX) if isinstance(message, Mapping) else None
        field = f"messages[{index}].{PREFIX}"
        if not isinstance(mark, bool | None):
            raise invalid(field, "must be true or false")
        if mark and (index < len(messages) - 1 or message.get("role") != "assistant"):
            raise invalid(field, "must be in the final message, and that of the assistant: the answer continues it")
    return bool(messages) and isinstance(messages[-1], Mapping) and bool(messages[-1].get(PREFIX))


def with_tool_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with `function_call` and the role `function` as a tool call and its result.

    Ids are made up: nine letters and digits, which all templates accept.
    """
    converted: list[Message] = []
    call_id = ""
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and "function_call" in message:
            rest = {name: value for name, value in message.items() if name != "function_call"}
            function = message["function_call"]
            if function not in (None, {}) and not message.get("tool_calls"):
                call_id = f"call{index:05}"
                function = _function(f"messages[{index}].function_call", function)
                rest["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            message = rest
        elif isinstance(message, Mapping) and message.get("role") == "function" and call_id:
            message = {**message, "role": "tool", "tool_call_id": call_id}
        converted.append(message)
    return converted


def _function(field: str, function: Any) -> Mapping[str, Any]:
    if not isinstance(function, Mapping):
        raise invalid(field, "must be an object")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{field}.name", "must be a string")
    if not isinstance(function.get("arguments"), str | Mapping | None):
        raise invalid(f"{field}.arguments", "must be JSON text or an object")
    return function


def without_empty(message: Message) -> dict[str, Any]:
    """The fields that say something: a null, no calls, no reasoning and an assistant's content without parts are as if
    they were absent."""
    absent: set[str] = {PREFIX, *(name for name, value in message.items() if value is None)}
    absent |= {name for name in REASONING_NAMES if message.get(name) == ""}
    absent |= {"tool_calls"} if message.get("tool_calls") == [] else set()
    absent |= {"content"} if message.get("content") == [] and message.get("role") == "assistant" else set()
    return {name: value for name, value in message.items() if name not in absent}


def has_later(chat: Sequence[Message], role: str) -> bool:
    """Whether a message of the role comes after the first message."""
    return any(message["role"] == role for message in chat[1:])


def merged_at_start(chat: list[dict[str, Any]], roles: Collection[str]) -> list[dict[str, Any]]:
    """The messages of the roles as one system message at the start, with blank lines between them."""
    instructions = [message for message in chat if message["role"] in roles]
    content = "\n\n".join(joined(message["content"]) for message in instructions if message.get("content"))
    return [{"role": "system", "content": content}, *(message for message in chat if message["role"] not in roles)]


def one_call_a_turn(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with several calls of one as turns of one call each, before its result: the next one that has the
    call's id, or that of none."""
    turns: list[dict[str, Any]] = []
    rest = list(chat)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            turns.append(message)
            continue
        count = next((index for index, one in enumerate(rest) if one["role"] != "tool"), len(rest))
        results, rest = rest[:count], rest[count:]
        ids = {call.get("id") for call in calls} - {None}
        for call in calls:
            turns.append(message | {"tool_calls": [call]})
            message = {"role": message["role"]}
            answered = (result.get("tool_call_id") for result in results)
            place = next((at for at, one in enumerate(answered) if one == call.get("id") or one not in ids), None)
            turns += [] if place is None else [results.pop(place)]
        turns += results
    return turns


def move_text_to_thought(message: dict[str, Any]) -> None:
    """Put an assistant's text behind its reasoning, if it has both: the template has no place for them."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if thought and content and (isinstance(content, str) or all("text" in part for part in content)):
        thought = f"{thought}\n\n{joined(message.pop('content'))}"
        message |= {"thinking": thought, "reasoning_content": thought}


def joined(content: str | list[dict[str, str]]) -> str:
    """The text of a content, whose parts become lines."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def tool_call(field: str, call: Any) -> dict[str, Any]:
    """A tool call; absent arguments are none, and text that is no JSON object stays as it is."""
    if not isinstance(call, Mapping):
        raise invalid(field, "must be an object")
    check_strings(field, call, ("id",))
    if call.get("type") not in (None, "function"):
        raise invalid(f"{field}.type", "must be 'function'")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise invalid(f"{field}.function", "must be an object")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{field}.function.name", "must be a string")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            parsed = json.loads(arguments or "{}")
            arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, Mapping):
        raise invalid(f"{field}.function.arguments", "must be JSON text or an object")
    return {**call, "function": {**function, "arguments": arguments}}


def with_text(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def check_strings(field: str, value: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise RequestError for a field of these names that is no string."""
    for name in names:
        if not isinstance(value.get(name), str | None):
            raise invalid(f"{field}.{name}", "must be a string")
