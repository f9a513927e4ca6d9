"""Checks of HTTP replies of any server."""

import json
from typing import Any

import httpx


def good(answer: httpx.Response) -> Any:
    """The JSON of a reply, which must be a 200."""
    assert answer.status_code == 200, answer.text
    return answer.json()


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which names its type twice; there is no [DONE]."""
    events = []
    for block in text.split("\n\n")[:-1]:
        if not block.startswith(":"):
            kind, fields = block.split("\n")
            events.append(json.loads(fields.removeprefix("data: ")))
            assert kind == f"event: {events[-1]['type']}"
    return events
