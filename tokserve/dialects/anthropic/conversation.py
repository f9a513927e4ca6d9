"""A conversation in Anthropic's blocks, as chat messages.

Turns of one role that follow each other are one turn, as Anthropic's API has them.  The results of tools come before
the text of the same turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokserve.base.errors import LONGEST_SHOWN, invalid
from tokserve.dialects.anthropic import documents
from tokserve.dialects.anthropic.tool_list import ToolList
from tokserve.features.images.parts import UnreadImage, anthropic_block

ROLES = ("user", "assistant", "system")
BLOCKS = {  # that a turn of each role may have
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text", "tool_addition", "tool_removal"),
}
RESULT_BLOCKS = ("text", "image", "document", "search_result", "tool_reference")
# The first block of Claude Code's system prompt, or its first line.  It differs in every request, so that no prefix
# would be found in the cache.
BILLING_HEADER = "x-anthropic-billing-header"
BETWEEN = "\n\n"  # system messages that are merged

Part = dict[str, str]


class TurnMessages:
    """Chat messages, made turn by turn.  `fields`: the path in the body of each message.

    `system_stays`: system messages stay between other turns; else they are added to the first.  `tools`: those that
    blocks refer to.  Raises RequestError naming the path of a block.
    """

    def __init__(self, tools: ToolList, *, system_stays: bool) -> None:
        self.fields: list[str] = []
        self._messages: list[dict[str, Any]] = []  # contents, and the reasoning, are lists that are still added to
        self._first_system: list[list[Part]] = []  # the contents of the system messages that are the first one
        self._tools = tools
        self._system_stays = system_stays

    def add_system(self, system: str | list[Any]) -> None:
        """The body's `system`, before all turns."""
        blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
        for i, block in enumerate(blocks):
            _check_kind(f"system[{i}]", block, ("text",), "in system")
        self._system("system", _without_billing([_text(f"system[{i}]", block) for i, block in enumerate(blocks)]))

    def add(self, field: str, turn: Any) -> None:
        """The next of the body's messages."""
        if not isinstance(turn, dict):
            raise invalid(field, "must be an object")
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES:
            raise invalid(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        if content is None:
            raise invalid(f"{field}.content", "is required")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, list):
            raise invalid(f"{field}.content", "must be a string or a list of blocks")
        blocks = [(f"{field}.content[{i}]", block) for i, block in enumerate(content)]
        for path, block in blocks:
            _check_kind(path, block, BLOCKS[role], f"in messages of the {role}")
        if role == "user":
            self._user(field, blocks)
        elif role == "assistant":
            self._assistant(field, blocks)
        else:
            self._system_turn(field, blocks)

    def messages(self) -> list[dict[str, Any]]:
        """All messages, as chat has them."""
        return [self._whole(message) for message in self._messages]

    @property
    def is_to_be_continued(self) -> bool:
        """Whether the last turn is the beginning of the answer."""
        last = self._last("assistant")
        return last is not None and "tool_calls" not in last and any(part["text"] for part in last["content"])

    def _whole(self, message: dict[str, Any]) -> dict[str, Any]:
        whole = dict(message)
        if message["content"] is self._first_system:
            groups = self._first_system
            texts = ["\n".join(part["text"] for part in parts) for parts in groups]
            whole["content"] = _content(groups[0]) if len(groups) == 1 else BETWEEN.join(texts)
        elif message["content"] or not message.keys() & {"reasoning", "tool_calls"}:
            whole["content"] = _content(message["content"])
        else:
            del whole["content"]
        if "reasoning" in message:
            whole["reasoning"] = "".join(message["reasoning"])
        return whole

    def _last(self, role: str) -> dict[str, Any] | None:
        return self._messages[-1] if self._messages and self._messages[-1]["role"] == role else None

    def _turn(self, role: str, field: str) -> dict[str, Any]:
        """The message of a turn: the last, if it has this role, or a new one."""
        message = self._last(role)
        if message is None:
            message = {"role": role, "content": []}
            self._append(field, message)
        return message

    def _user(self, field: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        parts: list[Part | UnreadImage] = []
        for path, block in blocks:
            if block["type"] == "tool_result":
                self._append(path, self._result(path, block))
            else:
                parts += _parts(path, block)
        if parts or not blocks:
            self._turn("user", field)["content"] += parts

    def _result(self, path: str, block: dict[str, Any]) -> dict[str, Any]:
        """The message of a tool."""
        content = block.get("content")
        content = "" if content is None else content
        message: dict[str, Any] = {"role": "tool", "tool_call_id": _string(path, block, "tool_use_id")}
        if block.get("is_error"):
            message["is_error"] = True
        if isinstance(content, str):
            return message | {"content": [{"type": "text", "text": content}]}
        if not isinstance(content, list):
            raise invalid(f"{path}.content", "must be a string or a list of blocks")
        parts: list[Part | UnreadImage] = []
        for i, inner in enumerate(content):
            at = f"{path}.content[{i}]"
            _check_kind(at, inner, RESULT_BLOCKS, "in results of tools")
            if inner["type"] == "tool_reference":
                self._tools.show(f"{at}.tool_name", inner.get("tool_name"))
                parts.append({"type": "text", "text": f"The tool {inner['tool_name']} is loaded."})
            else:
                parts += _parts(at, inner)
        return message | {"content": parts}

    def _assistant(self, field: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        message = self._turn("assistant", field)
        for path, block in blocks:
            match block["type"]:
                case "text":
                    message["content"].append(_text(path, block))
                case "thinking":
                    message.setdefault("reasoning", []).append(_string(path, block, "thinking"))
                case "tool_use":
                    message.setdefault("tool_calls", []).append(_call(path, block))

    def _system_turn(self, field: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        for path, block in blocks:
            if block["type"] != "text":
                self._change_tools(path, block)
        parts = [_text(path, block) for path, block in blocks if block["type"] == "text"]
        self._system(field, _without_billing(parts))

    def _change_tools(self, path: str, block: dict[str, Any]) -> None:
        """Show a tool, or show it no more."""
        tool = block.get("tool")
        if not isinstance(tool, dict):
            raise invalid(f"{path}.tool", "must be an object")
        is_addition = block["type"] == "tool_addition"
        if is_addition and tool.get("type") == "tool_definition":
            self._tools.define(f"{path}.tool.definition", tool.get("definition"))
        elif tool.get("type") != "tool_reference":
            kinds = "tool_reference or tool_definition" if is_addition else "tool_reference"
            raise invalid(f"{path}.tool.type", f"must be {kinds}")
        elif is_addition:
            self._tools.show(f"{path}.tool.name", tool.get("name"))
        else:
            self._tools.hide(f"{path}.tool.name", tool.get("name"))

    def _system(self, field: str, parts: list[Part]) -> None:
        if not parts:
            return
        message: dict[str, Any] = {"role": "system", "content": self._first_system}
        if self._first_system and (len(self._messages) == 1 or not self._system_stays):
            self._first_system.append(parts)
        elif not self._messages:
            self._first_system.append(parts)
            self._append(field, message)
        elif self._system_stays:
            self._append(field, message | {"content": parts})
        else:
            self._first_system.append(parts)
            self._messages.insert(0, message)
            self.fields.insert(0, field)

    def _append(self, field: str, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self.fields.append(field)


def _check_kind(path: str, block: Any, kinds: tuple[str, ...], where: str) -> None:
    if not isinstance(block, dict):
        raise invalid(path, "must be an object")
    kind = block.get("type")
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", "must be a string" if "type" in block else "is required")
    if kind not in kinds:
        known = ", ".join(kinds)
        raise invalid(f"{path}.type", f"must be {known} {where}, got {kind[:LONGEST_SHOWN]!r}", code="unsupported")


def _text(path: str, block: dict[str, Any]) -> Part:
    return {"type": "text", "text": _string(path, block, "text")}


def _parts(path: str, block: dict[str, Any]) -> list[Part | UnreadImage]:
    """What a block adds to the content of its turn."""
    match block["type"]:
        case "text":
            return [_text(path, block)]
        case "image":
            return [UnreadImage(path, block, anthropic_block)]
        case _:
            return documents.parts_of(path, block)


def _without_billing(parts: list[Part]) -> list[Part]:
    """The parts with a text, without the billing header: a block, or the first line of the only one."""
    if len(parts) == 1 and parts[0]["text"].startswith(BILLING_HEADER):
        parts = [{"type": "text", "text": parts[0]["text"].partition("\n")[2].lstrip("\n")}]
    return [part for part in parts if part["text"] and not part["text"].startswith(BILLING_HEADER)]


def _call(path: str, block: dict[str, Any]) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise invalid(f"{path}.input", "must be an object")
    function = {"name": _string(path, block, "name"), "arguments": arguments}
    return {"id": _string(path, block, "id"), "type": "function", "function": function}


def _string(path: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{path}.{name}", "must be a string" if name in block else "is required")
    return value


def _content(parts: Sequence[Part | UnreadImage]) -> str | list[Part | UnreadImage]:
    """The content for chat.  A list of one text becomes this text, which more templates accept."""
    if len(parts) == 1 and isinstance(parts[0], dict):
        return parts[0]["text"]
    return list(parts) or ""
