"""Schemas of Anthropic's bodies in /openapi.json, narrowed to what the routes accept."""

from __future__ import annotations

from collections.abc import Sequence

from tokserve.server.openapi import JsonSchema

# their conversation, with the contents that need nothing else, and a model that must be named
CONVERSATIONS = ("MessagesBody", "CountTokensBody")
TURNS: JsonSchema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
                    },
                ]
            },
        },
    },
}


def narrow(components: dict[str, JsonSchema], models: Sequence[str] | None) -> None:
    """Narrow the schemas of the room's bodies in place."""
    for name in CONVERSATIONS:
        if name in components:
            components[name]["properties"] |= {
                "messages": TURNS,
                "model": {"type": "string", "minLength": 1} if models is None else {"enum": list(models)},
            }
            components[name]["required"] = ["model", *components[name]["required"]]
