"""The items of the Responses API: turns input items into chat messages, and an answer into output items.

An answer becomes items while it arrives, in the same steps for a stream and a whole reply.  Each step emits an event,
which a whole reply ignores.  Items are in the order of the answer's text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tokserve.base.errors import invalid
from tokserve.dialects.openai import tools
from tokserve.dialects.openai.token_segments import OutputToken, SegmentReader, TokenSegment
from tokserve.features.chat.chat import part_text
from tokserve.features.chat.parsing import Parser
from tokserve.features.images.parts import CHAT_KINDS, UnreadImage, chat_part
from tokserve.server.http import errors
from tokserve.server.replies.logprobs import ChatLogprob, TextOffset

KINDS = ("message", "reasoning", "function_call", "function_call_output")
ROLES = ("user", "assistant", "system", "developer")
Part = dict[str, str] | UnreadImage  # of a content: text, or an image
EmitEvent = Callable[[str, dict[str, Any]], None]  # takes the name of an event, without "response.", and its fields


class InputMessages:
    """An input as chat messages.  `fields`: the path in the body of each message.

    The items of one turn of the assistant form one message, as in chat: reasoning, then text, then calls.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.fields: list[str] = []
        self._turn: dict[str, Any] | None = None  # the assistant's message, while items may be added to it

    def append(self, field: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.fields.append(field)
        self._turn = None

    def add(self, field: str, item: Any) -> None:
        """Add the next item.  Raises RequestError naming `field` or a path in it."""
        if not isinstance(item, dict):
            raise invalid(field, "must be an object")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(field, item)
        elif kind == "reasoning":
            self._reasoning(field, item)
        elif kind == "function_call":
            function = {"name": _string(field, item, "name"), "arguments": _arguments(field, item)}
            call = {"id": _string(field, item, "call_id"), "type": "function", "function": function}
            self._assistant(field, calls=True).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(f"{field}.output", item.get("output"))
            self.append(field, {"role": "tool", "tool_call_id": _string(field, item, "call_id"), "content": content})
        elif kind is None:
            raise invalid(f"{field}.type", "is required")
        else:
            reason = "nothing is stored" if kind == "item_reference" else f"it takes {', '.join(KINDS)}"
            errors.refuse_unsupported(f"{field}.type", kind, reason=reason)

    def _message(self, field: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise invalid(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        content = _content(f"{field}.content", item.get("content"))
        if role != "assistant":
            self.append(field, {"role": role, "content": content})
            return
        turn = self._assistant(field)
        turn["content"] = _parts(turn["content"]) + _parts(content) if "content" in turn else content

    def _reasoning(self, field: str, item: dict[str, Any]) -> None:
        """Add the text of the reasoning, or else its summary; encrypted reasoning is skipped."""
        name = "content" if item.get("content") else "summary"
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise invalid(f"{field}.{name}", "must be a list of parts")
        texts = [_string(f"{field}.{name}[{i}]", part, "text") for i, part in enumerate(parts)]
        if any(texts):
            turn = self._assistant(field)
            turn["reasoning"] = "\n".join(([turn["reasoning"]] if "reasoning" in turn else []) + texts)

    def _assistant(self, field: str, *, calls: bool = False) -> dict[str, Any]:
        """The message of the assistant's turn: a message with content takes only calls and what follows them."""
        turn = self._turn
        if turn is None or ("content" in turn and "tool_calls" not in turn and not calls):
            turn = {"role": "assistant"}
            self.append(field, turn)
            self._turn = turn
        return turn


def _arguments(field: str, item: dict[str, Any]) -> str | dict[str, Any]:
    """JSON text, or the object that some clients send."""
    arguments = item.get("arguments")
    return arguments if isinstance(arguments, dict) else _string(field, item, "arguments")


def _string(field: str, item: Any, name: str) -> str:
    value = item.get(name) if isinstance(item, dict) else None
    if not isinstance(value, str):
        raise invalid(f"{field}.{name}", "must be a string")
    return value


def _content(field: str, content: Any) -> str | list[Part]:
    """The content for chat.  A list of one part becomes its text, which more templates accept."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(field, "must be a string or a list of parts")
    parts = [_part(f"{field}[{i}]", part) for i, part in enumerate(content)]
    return parts[0]["text"] if len(parts) == 1 and isinstance(parts[0], dict) else parts


def _part(field: str, part: Any) -> Part:
    if isinstance(part, dict) and part.get("type") in CHAT_KINDS:
        return UnreadImage(field, part, chat_part)
    return {"type": "text", "text": part_text(field, part)}


def _parts(content: str | list[Part]) -> list[Part]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The part of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The part of a reasoning item."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A message of the assistant."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """The reasoning before a message."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call, with arguments as JSON text."""

    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


Item = OutputMessage | ReasoningItem | FunctionCallItem


class _OpenItem:
    """The item that is being written; emits its events."""

    def __init__(self, kind: str, item: Item, index: int, emit: EmitEvent) -> None:
        self.kind = kind
        self.item = item
        self._texts: list[str] = []
        self._position: dict[str, Any] = {"item_id": item.id, "output_index": index}
        self._emit = emit
        emit("output_item.added", {"output_index": index, "item": item})
        if isinstance(item, FunctionCallItem):
            self._name = "function_call_arguments"
            return
        self._position["content_index"] = 0
        if isinstance(item, OutputMessage):
            self._name, item.content = "output_text", [OutputText()]
        else:
            self._name, item.content = "reasoning_text", [ReasoningText()]
        emit("content_part.added", self._position | {"part": item.content[0]})

    def add(self, text: str, tokens: Sequence[OutputToken]) -> None:
        """Append text and tokens; only messages show logprobs."""
        entries: list[ChatLogprob] = []
        fields = {**self._position, "delta": text}
        if isinstance(self.item, OutputMessage):
            entries = [token.entry for token in tokens if token.entry is not None]
            self.item.content[0].logprobs += entries
            fields["logprobs"] = entries
        if text or entries:
            self._texts.append(text)
            self._emit(f"{self._name}.delta", fields)

    def close(self, status: str) -> None:
        """Complete the item."""
        item, text = self.item, "".join(self._texts)
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            self._emit(f"{self._name}.done", self._position | {"name": item.name, "arguments": text})
        else:
            part = item.content[0]
            part.text = text
            logprobs = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            self._emit(f"{self._name}.done", self._position | {"text": text} | logprobs)
            self._emit("content_part.done", self._position | {"part": part})
        item.status = status
        self._emit("output_item.done", {"output_index": self._position["output_index"], "item": item})


class OutputItems:
    """The items of one answer.  Their ids are made from `key`, the id of the request, and those of calls from
    `call_key`.

    `offset`: to assign tokens to items; None: tokens are not assigned.
    """

    def __init__(self, key: str, call_key: str, parser: Parser, offset: TextOffset | None, emit: EmitEvent) -> None:
        self.items: list[Item] = []
        self._key, self._call_key = key, call_key
        self._parser = parser
        self._reader = SegmentReader(parser, offset)
        self._emit = emit
        self._open: _OpenItem | None = None
        self._num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        """The tokens of reasoning so far."""
        return self._reader.reasoning_tokens

    def push(self, text: str, token_ids: Sequence[int], entries: Sequence[ChatLogprob] | None, *, final: bool) -> None:
        """Add a delta of the answer.  `entries`: the tokens' logprobs, if they are shown."""
        self._write(self._reader.read(text, token_ids, entries, final=final))

    def end(self, *, complete: bool) -> None:
        """End the answer.  `complete`: it stopped by itself.  An empty answer is an empty message."""
        self._write(self._reader.finish())
        open_item = self._open or self._begin("content")
        open_item.add("", self._reader.rest)
        open_item.close("completed" if complete and self._is_whole(open_item) else "incomplete")

    def _write(self, segments: Iterable[TokenSegment]) -> None:
        for kind, segment, tokens, before in segments:
            open_item = self._open
            if open_item is not None:
                open_item.add("", before)
            if kind == "call":
                self._begin(kind, name=segment).add("", tokens)
                continue
            if open_item is None or kind not in (open_item.kind, "arguments"):
                open_item = self._begin(kind)
            open_item.add(segment, tokens)

    def _is_whole(self, open_item: _OpenItem) -> bool:
        """Whether an item with text after it, or the end, is complete: a call may lack its end, or not be JSON."""
        return open_item.kind != "call" or self._parser.is_whole[self._num_calls - 1]

    def _begin(self, kind: str, *, name: str = "") -> _OpenItem:
        if self._open is not None:
            self._open.close("completed" if self._is_whole(self._open) else "incomplete")
        index = len(self.items)
        item: Item
        if kind == "call":
            call_id = tools.call_id(self._call_key, 0, self._num_calls)
            self._num_calls += 1
            item = FunctionCallItem(id=f"fc_{self._key}-{index}", call_id=call_id, name=name)
        elif kind == "reasoning":
            item = ReasoningItem(id=f"rs_{self._key}-{index}")
        else:
            item = OutputMessage(id=f"msg_{self._key}-{index}")
        self.items.append(item)
        self._open = _OpenItem(kind, item, index, self._emit)
        return self._open
