"""Schemas of OpenAI's bodies in /openapi.json, narrowed to what the routes accept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from tokserve.dialects.openai.schemas import NO_LIMIT
from tokserve.dialects.openai.tools import MAX_CALLS
from tokserve.server.openapi import IDS, JsonSchema, branch

ONE_OF_REQUIRED = {
    "ChatBody": ("messages", "tokens"),
    "CompletionBody": ("prompt",),
    "ResponsesBody": ("input",),
}
PROMPT: JsonSchema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        IDS,
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string", "minLength": 1}, IDS]}},
    ]
}
UNLIMITED = ("ChatBody", "SglangChatBody", "CompletionBody", "ResponsesBody")  # bodies that can ask for no limit
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def narrow(components: dict[str, JsonSchema], models: Sequence[str] | None) -> None:
    """Narrow the schemas of the room's bodies in place."""
    for name, needed in ONE_OF_REQUIRED.items():
        if name in components:
            components[name]["anyOf"] = [{"required": [field]} for field in needed]
    if "CompletionBody" in components:
        fields: dict[str, Any] = components["CompletionBody"]["properties"]
        fields["prompt"] = PROMPT
        for name in {"max_tokens", "max_completion_tokens"} & fields.keys():  # 0: a prompt can be scored
            branch(fields[name], "integer")["minimum"] = 0
    for component in components.values():
        if field := component.get("properties", {}).get("max_tool_calls"):
            branch(field, "integer").update({"minimum": 1, "maximum": MAX_CALLS})
    for name, limit in product(UNLIMITED, OUTPUT_LIMITS):
        if limit in components.get(name, {}).get("properties", {}):
            components[name]["properties"][limit]["anyOf"].append({"const": NO_LIMIT})
