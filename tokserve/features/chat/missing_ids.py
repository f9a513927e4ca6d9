"""The ids of tool calls that a chat template needs and a conversation lacks, found out by rendering with some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

SAMPLE = "sample001"  # nine letters, as Mistral's templates demand

Chat = Sequence[Mapping[str, Any]]


def missing_id(messages: Chat, chat: Chat, renders: Callable[[list[dict[str, Any]]], bool]) -> str | None:
    """The path in `messages` of the first id without which the template refuses `chat`, which is made of them; None:
    nothing is missing, or that is not why.  `renders`: whether it renders a conversation."""
    absent = [path for index, message in enumerate(messages) for path in _absent(f"messages[{index}]", message)]
    if not absent or not renders([_with_ids(message) for message in chat]):
        return None
    kinds = [
        [path for path in absent if path.endswith("tool_call_id") == of_results]
        for of_results in (True, False)
        if not renders([_with_ids(message, results=not of_results, calls=of_results) for message in chat])
    ]
    needed = [path for paths in kinds for path in paths]
    return next((path for path in absent if path in needed), absent[0])


def _absent(field: str, message: Mapping[str, Any]) -> list[str]:
    """Paths of the ids that a message lacks."""
    paths = [f"{field}.tool_call_id"] if message.get("role") == "tool" and message.get("tool_call_id") is None else []
    calls = message.get("tool_calls") or ()
    return paths + [f"{field}.tool_calls[{i}].id" for i, call in enumerate(calls) if call.get("id") is None]


def _with_ids(message: Mapping[str, Any], *, results: bool = True, calls: bool = True) -> dict[str, Any]:
    """A message with samples for its missing ids: that of the result, or those of the calls."""
    complete = dict(message)
    if results and message.get("role") == "tool":
        complete.setdefault("tool_call_id", SAMPLE)
    if calls and message.get("tool_calls"):
        complete["tool_calls"] = [
            call if call.get("id") is not None else {**call, "id": SAMPLE} for call in message["tool_calls"]
        ]
    return complete
