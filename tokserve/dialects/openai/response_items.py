"""The output items of the Responses API: messages, reasoning and calls.

An answer becomes items while it arrives, in the same steps for a stream and a whole reply.  Each step emits an event,
which a whole reply ignores.  Items are in the order of the answer's text.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.dialects.openai import tools
from tokserve.dialects.openai.response_calls import CallItem, EmitEvent, OpenCall, open_call
from tokserve.dialects.openai.response_tools import ServedTool
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.token_segments import OutputToken, SegmentReader, TokenSegment
from tokserve.server.replies.logprobs import ChatLogprob, TextOffset

ENCODED = "text:"  # begins an `encrypted_content` of this server: base64 of the text follows


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The part of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The part of a reasoning item."""

    text: str = ""


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """The part of a reasoning item for clients that ask for a summary: all of the text."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A message of the assistant."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """The reasoning before a message.  `encrypted_content`: the text once more, encoded, for clients that send nothing
    else back."""

    id: str
    status: str = "in_progress"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


Item = OutputMessage | ReasoningItem | CallItem


def encoded_reasoning(text: str) -> str:
    """The `encrypted_content` of a reasoning item with this text."""
    return ENCODED + base64.b64encode(text.encode()).decode()


def decoded_reasoning(content: Any) -> str:
    """The text in an `encrypted_content` that this server made; "" for that of others."""
    if not isinstance(content, str) or not content.startswith(ENCODED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(ENCODED), validate=True).decode()
    except ValueError:
        return ""


class _OpenText:
    """The message or reasoning that is being written; emits its events."""

    def __init__(
        self, kind: str, item: OutputMessage | ReasoningItem, index: int, emit: EmitEvent, *, summarized: bool = False
    ) -> None:
        self.kind = kind
        self.item = item
        self._texts: list[str] = []
        self._position: dict[str, Any] = {"item_id": item.id, "output_index": index}
        self._position["summary_index" if summarized else "content_index"] = 0
        self._emit = emit
        self._part: OutputText | ReasoningText | SummaryText
        emit("output_item.added", {"output_index": index, "item": item})
        if isinstance(item, OutputMessage):
            self._name, self._part_name, self._part = "output_text", "content_part", OutputText()
            item.content = [self._part]
        elif summarized:
            self._name, self._part_name, self._part = "reasoning_summary_text", "reasoning_summary_part", SummaryText()
            item.summary = [self._part]
        else:
            self._name, self._part_name, self._part = "reasoning_text", "content_part", ReasoningText()
            item.content = [self._part]
        emit(f"{self._part_name}.added", self._position | {"part": self._part})

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
        item, part, text = self.item, self._part, "".join(self._texts)
        part.text = text
        logprobs = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
        self._emit(f"{self._name}.done", self._position | {"text": text} | logprobs)
        self._emit(f"{self._part_name}.done", self._position | {"part": part})
        item.status = status
        if isinstance(item, ReasoningItem) and item.encrypted_content is not UNSET:
            item.encrypted_content = encoded_reasoning(text)
        self._emit("output_item.done", {"output_index": self._position["output_index"], "item": item})


_OpenItem = _OpenText | OpenCall


class OutputItems:
    """The items of one answer.  Their ids are made from `key`, the id of the request, and those of calls from
    `call_key`.

    `offset`: to assign tokens to items; None: tokens are not assigned.  `served`: what the functions of the chat stand
    for; `raw`: the custom tool whose input the whole answer is, by its name in the chat; `encoded`: reasoning has its
    `encrypted_content`; `summarized`: its text is its summary.
    """

    def __init__(
        self,
        key: str,
        call_key: str,
        parser: Parser,
        offset: TextOffset | None,
        emit: EmitEvent,
        served: Mapping[str, ServedTool],
        raw: str | None = None,
        *,
        encoded: bool = False,
        summarized: bool = False,
    ) -> None:
        self._summarized = summarized
        self._encrypted_content: str | UnsetType = "" if encoded else UNSET  # of an item that begins
        self._written: list[_OpenItem] = []  # the last one may be open
        self._key, self._call_key = key, call_key
        self._served, self._raw = served, raw
        self._parser = parser
        self._reader = SegmentReader(parser, offset)
        self._emit = emit
        self._open: _OpenItem | None = None
        self._num_calls = 0

    @property
    def items(self) -> list[Item]:
        """The items so far."""
        return [written.item for written in self._written]

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
        index = len(self._written)
        raw = self._raw if kind == "content" else None
        opened: _OpenItem
        if kind == "call" or raw is not None:
            called = name if raw is None else raw
            given = self._parser.call_ids[self._num_calls] if raw is None else ""
            call_id = given or tools.call_id(self._call_key, 0, self._num_calls)
            self._num_calls += 1
            item_id, tool = f"{self._key}-{index}", self._served.get(called)
            opened = open_call(tool, call_id, item_id, called, index, self._emit, raw=raw is not None)
        elif kind == "reasoning":
            item = ReasoningItem(id=f"rs_{self._key}-{index}", encrypted_content=self._encrypted_content)
            opened = _OpenText(kind, item, index, self._emit, summarized=self._summarized)
        else:
            opened = _OpenText(kind, OutputMessage(id=f"msg_{self._key}-{index}"), index, self._emit)
        self._written.append(opened)
        self._open = opened
        return opened
