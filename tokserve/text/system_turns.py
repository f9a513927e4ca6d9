"""Whether a chat template takes system messages between other turns, found out by rendering some.

Many templates have a place for one system message at the start: others they refuse, move, or leave out.
"""

from __future__ import annotations

from typing import Any

from tokserve.errors import RequestError
from tokserve.text.chat import ChatTemplate

ROLES = ("system", "user", "system", "assistant", "user", "system")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def takes_later_system(template: ChatTemplate) -> bool:
    """Whether system messages stay where they are, with tools and without."""
    return all(_in_order(template, tools) for tools in (None, [TOOL]))


def _in_order(template: ChatTemplate, tools: list[dict[str, Any]] | None) -> bool:
    messages = [{"role": role, "content": f"turn<{index}>"} for index, role in enumerate(ROLES)]
    try:
        text = template.text(messages, tools=tools, add_generation_prompt=True, must_show_tools=False)
    except RequestError:
        return False
    places = [text.find(message["content"]) for message in messages]
    return -1 not in places and places == sorted(places)
