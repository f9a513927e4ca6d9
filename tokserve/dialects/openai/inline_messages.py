"""The token route's outputs as chat messages, in one request: what `derender` makes of a reply afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from tokserve.client.outputs import ChoiceOutput
from tokserve.dialects.openai import chat, schemas
from tokserve.dialects.openai.chat import Delta, Message
from tokserve.dialects.openai.derender.reader import with_prefix
from tokserve.dialects.openai.schemas import ChatBody
from tokserve.dialects.openai.tools import OutputParser
from tokserve.features.chat.text_context import TextContext
from tokserve.protocol.params import SamplingParams
from tokserve.server.serving import Serving

# the fields of a chat body that say how its outputs are read
CONTEXT = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_tool_calls",
    "response_format",
    "structured_outputs",
    "include_reasoning",
    "chat_template",
)


class InlineMessages:
    """Reads the choices of one reply; `parser` None: their text is the content."""

    def __init__(self, parser: OutputParser | None, *, shows_reasoning: bool) -> None:
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self._begun: set[int] = set()

    def message(self, choice: ChoiceOutput) -> Message:
        return chat.message_of(choice, self._parser, shows_reasoning=self._shows_reasoning)

    def delta(self, delta: ChoiceOutput) -> Delta:
        """The first of a choice has the role."""
        added = Delta()
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            added.role = "assistant"
        if self._parser is None:
            added.content = delta.text or ""
            return added
        read = self._parser.read(delta)
        added.content = read.content or UNSET
        if self._shows_reasoning:
            added.reasoning = added.reasoning_content = read.reasoning or UNSET
        added.tool_calls = read.calls or UNSET
        return added


def make_reader(
    serving: Serving, chat_request: Any, field: str, params: SamplingParams, prompt: Sequence[int], key: str
) -> InlineMessages:
    """The reader of one reply; `message_reader` describes the arguments."""
    tokenizer = serving.tokenizer
    body = ChatBody()
    if chat_request is not None:
        parse = schemas.parse
        body, _ = with_prefix(field, lambda: parse(ChatBody, chat_request, strict=serving.config.server.strict))
    plan = with_prefix(field, lambda: chat.tool_plan(serving, body))
    if plan.output_format is None:
        return InlineMessages(None, shows_reasoning=True)
    start = chat.answer_start(serving, body, plan, prompt)
    parser = OutputParser(
        plan.output_format, f"{key}-{len(prompt)}", start, tokenizer.pieces(params.skip_special_tokens)
    )
    return InlineMessages(parser, shows_reasoning=body.include_reasoning is not False)


def parse_context(serving: Serving, body: ChatBody) -> dict[str, Any] | None:
    """What a rendered request says for its outputs to be read as this body's; None: nothing."""
    sent = {name: value for name in CONTEXT if (value := getattr(body, name)) is not None}
    if sent.get("parallel_tool_calls"):
        del sent["parallel_tool_calls"]  # the default
    thinks = serving.state_of(TextContext).thinking is not None
    return msgspec.to_builtins(sent) if sent.keys() - {"chat_template"} or (sent and thinks) else None
