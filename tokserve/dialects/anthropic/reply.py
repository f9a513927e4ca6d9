"""An answer as Anthropic's blocks, whole or as events.

Blocks are made while the answer arrives, in the same steps for a stream and a whole reply; each step emits an event,
which a whole reply ignores.  Blocks are in the order of the answer's text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tokserve.base.errors import RequestError
from tokserve.client.outputs import ChoiceOutput
from tokserve.dialects.anthropic import error_shape
from tokserve.dialects.openai import tools
from tokserve.dialects.openai.chat import ChatCall
from tokserve.features.chat.json_scanner import complete_members
from tokserve.features.chat.output_format import OutputFormat
from tokserve.features.chat.parsing import Parser
from tokserve.server.generation import Generation
from tokserve.server.http import body
from tokserve.server.replies import sse
from tokserve.server.replies.reply_fields import StopDetail, WeightVersion, versions
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.replies.reply_parts import DeferredParts
from tokserve.server.serving import Serving

ID_PREFIX = "msg_"
EXACT = ("eos", "stop_string", "max_tokens")  # stop details that a stop reason says completely
EmitEvent = Callable[[str, dict[str, Any]], None]  # takes the type of an event and its fields


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A block of text."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning.  The signature is a digest of it: clients demand one, and this server checks none."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    """A block with a call of a tool."""

    id: str
    name: str
    input: dict[str, Any] | Raw = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(msgspec.Struct):
    """Numbers of tokens; those read from the cache are not in `input_tokens`.  Writing to the cache is not charged."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessagesReply(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The message.  `stop_detail`: where `stop_reason` does not say why it ended."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    stop_detail: StopDetail | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET


class _OpenBlock:
    """The block that is being written; emits its events."""

    def __init__(self, kind: str, block: Block, index: int, emit: EmitEvent) -> None:
        self.kind = kind
        self._block = block
        self._index = index
        self._emit = emit
        self._texts: list[str] = []
        emit("content_block_start", {"index": index, "content_block": block})

    def add(self, text: str) -> None:
        if text:
            self._texts.append(text)
            match self._block:
                case TextBlock():
                    self._delta("text_delta", "text", text)
                case ThinkingBlock():
                    self._delta("thinking_delta", "thinking", text)
                case ToolUseBlock():
                    pass  # until the end says whether it is complete

    def close(self, *, complete: bool = True) -> None:
        """Complete the block.  `complete`: so is the call that it has."""
        block, text = self._block, "".join(self._texts)
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking, block.signature = text, hashlib.sha256(text.encode()).hexdigest()
                self._delta("signature_delta", "signature", block.signature)
            case ToolUseBlock():
                if not complete:
                    text = msgspec.json.encode(complete_members(text)).decode()
                block.input = Raw(text.encode())
                self._delta("input_json_delta", "partial_json", text)
        self._emit("content_block_stop", {"index": self._index})

    def _delta(self, kind: str, name: str, text: str) -> None:
        self._emit("content_block_delta", {"index": self._index, "delta": {"type": kind, name: text}})


class OutputBlocks:
    """The blocks of one answer, from a parser of whole calls.  The ids of calls are made from `call_key`.

    A block of a call can not be taken back, and clients run what it has: it comes when its input is complete.  Only
    `max_tokens` makes an incomplete one, and the stop reason says so.
    """

    def __init__(self, call_key: str, parser: Parser, emit: EmitEvent) -> None:
        self.blocks: list[Block] = []
        self._call_key = call_key
        self._num_calls = 0
        self._parser = parser
        self._emit = emit
        self._open: _OpenBlock | None = None

    def push(self, text: str, *, final: bool, cut: bool = False) -> None:
        """Add a delta of the answer.  An empty answer is an empty text.  `cut`: it ends here because it is too long."""
        for kind, segment in self._parser.push(text, final, cut=cut):
            if kind == "call":
                self._begin(kind, name=segment)
                continue
            open_block = self._open
            if open_block is None or not (open_block.kind == kind or kind == "arguments"):
                open_block = self._begin(kind)
            open_block.add(segment)
        if final:
            self._close(self._open or self._begin("content"))

    def _close(self, open_block: _OpenBlock) -> None:
        open_block.close(complete=open_block.kind != "call" or self._parser.is_whole[self._num_calls - 1])

    def _begin(self, kind: str, *, name: str = "") -> _OpenBlock:
        if self._open is not None:
            self._close(self._open)
        block: Block
        if kind == "call":
            block = ToolUseBlock(
                id=self._parser.call_ids[self._num_calls] or tools.call_id(self._call_key, 0, self._num_calls),
                name=name,
            )
            self._num_calls += 1
        elif kind == "reasoning":
            block = ThinkingBlock()
        else:
            block = TextBlock()
        self.blocks.append(block)
        self._open = _OpenBlock(kind, block, len(self.blocks) - 1, self._emit)
        return self._open


def _ignore_event(name: str, fields: dict[str, Any]) -> None:
    """The event sink of replies that are not streamed."""


class MessagesRenderer:
    """Renders one answer as JSON, or as events.

    The first event comes with the first token: only then is known how much of the prompt was cached.
    """

    def __init__(self, serving: Serving, generation: Generation, call: ChatCall) -> None:
        self._generation = generation
        self._model = serving.model.answers_as(call.route.body.model)
        self._with_ids = bool(call.route.body.return_token_ids)
        self._parser = Parser(call.plan.output_format or OutputFormat(), call.start, whole_calls=True)
        emit = self._emit if call.generate.options.stream else _ignore_event
        self._output = OutputBlocks(tools.call_key(generation), self._parser, emit)
        self._token_ids: list[int] = []
        self._last: ChoiceOutput | None = None
        self._events: list[bytes] = []
        self._begun = False

    def reply(self, choices: list[ChoiceOutput], parts: DeferredParts | None = None) -> MessagesReply:
        for completion in choices:  # there is one
            self._push(completion)
        assert self._last is not None
        reply = self._message()
        reply.content = self._output.blocks
        reply.stop_reason, reply.stop_sequence = self._stop_reason(self._last)
        reply.stop_detail, reply.metrics = _detail(self._last), self._generation.metrics()
        if self._with_ids:
            reply.token_ids, reply.weight_versions = self._token_ids, versions(self._last)
        return reply

    def delta(self, delta: ChoiceOutput) -> bytes:
        if not self._begun:
            self._begun = True
            message = self._message()
            message.usage.output_tokens = 0
            self._emit("message_start", {"message": message})
        self._push(delta)
        return self._take_events()

    def tail(self) -> bytes:
        """No events: `close` makes the last ones."""
        return b""

    def close(self, error: RequestError | None) -> bytes:
        """The last events, with the reason and the usage; or the error."""
        if error is not None:
            return b"event: error\n" + sse.event(error_shape.encode(error))
        assert self._last is not None
        reason, sequence = self._stop_reason(self._last)
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_detail": _detail(self._last)}
        fields = {"delta": {name: value for name, value in delta.items() if value is not UNSET}, "usage": self._usage()}
        if self._with_ids:
            fields |= {"token_ids": self._token_ids, "weight_versions": versions(self._last)}
        metrics = self._generation.metrics()
        if metrics is not UNSET:
            fields["metrics"] = metrics
        self._emit("message_delta", fields)
        self._emit("message_stop", {})
        return self._take_events()

    def _push(self, c: ChoiceOutput) -> None:
        if self._with_ids:
            self._token_ids += c.token_ids
        is_last = c.finish_reason is not None
        self._output.push(c.text or "", final=is_last, cut=c.finish_reason == "length")
        if is_last:
            self._last = c

    def _message(self) -> MessagesReply:
        message = MessagesReply(id=ID_PREFIX + self._generation.key, model=self._model, usage=self._usage())
        if self._with_ids:
            message.prompt_token_ids = self._generation.prompt_ids()
        return message

    def _usage(self) -> MessagesUsage:
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)

    def _stop_reason(self, c: ChoiceOutput) -> tuple[str | None, str | None]:
        """The stop reason and the stop sequence.  A stop sequence after complete calls does not undo them; None: a
        reason that Anthropic does not have, which is in `stop_detail`."""
        if c.finish_reason == "length":
            return "max_tokens", None
        if c.finish_reason != "stop":
            return None, None
        if self._parser.complete:
            return "tool_use", None
        return ("stop_sequence", c.stop_reason) if isinstance(c.stop_reason, str) else ("end_turn", None)

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        self._events.append(f"event: {kind}\n".encode() + sse.event(body.encode_json({"type": kind, **fields})))

    def _take_events(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def returned_message(generation: Generation, call: ChatCall, choice: ChoiceOutput) -> dict[str, Any]:
    """The message that a client gets for a whole choice, as it is in chat."""
    parser = Parser(call.plan.output_format or OutputFormat(), call.start, whole_calls=True)
    output = OutputBlocks(tools.call_key(generation), parser, _ignore_event)
    output.push(choice.text or "", final=True, cut=choice.finish_reason == "length")
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[dict[str, Any]] = []
    for block in output.blocks:
        match block:
            case TextBlock():
                texts["content"].append(block.text)
            case ThinkingBlock():
                texts["reasoning"].append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["content"])}
    message |= {"reasoning": "".join(texts["reasoning"])} if texts["reasoning"] else {}
    return message | ({"tool_calls": calls} if calls else {})


def _detail(c: ChoiceOutput) -> StopDetail | UnsetType:
    return UNSET if c.stop_detail in EXACT else StopDetail(c.stop_detail, c.message)
