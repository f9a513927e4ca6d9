"""Reads finished answers: the tool calls in a text, and its reasoning, without generating anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import LONGEST_SHOWN, RequestError, invalid
from tokserve.config.parsers import REASONING_SYNONYMS, TOOL_SYNONYMS
from tokserve.dialects.openai import schemas, tools
from tokserve.dialects.sglang.replies import json
from tokserve.features.chat.output_format import AnswerStart, OutputFormat, Segment, Thinking, ToolFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.text_context import TextContext
from tokserve.features.chat.tool_formats import THINKING, TOOL_FORMATS
from tokserve.server.serving import Serving


class HasName(Protocol):
    """A row of a table of formats."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=HasName)


class ParseCallsBody(schemas.RequestBody):
    """The body of /parse_function_call; without a parser, the server's is used."""

    text: str
    tools: list[dict[str, Any]] = []
    tool_call_parser: str | None = None


class SeparateReasoningBody(schemas.RequestBody):
    """The body of /separate_reasoning."""

    text: str
    reasoning_parser: str
    return_blocks: bool = False


class ParsedCall(msgspec.Struct):
    """A call; `tool_index`: which of the text's calls; `parameters`: its arguments as JSON."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(msgspec.Struct):
    """The reply of /parse_function_call."""

    normal_text: str
    calls: list[ParsedCall]


class SeparatedReasoning(msgspec.Struct):
    """The reply of /separate_reasoning."""

    reasoning_text: str
    text: str


async def parse_function_call(serving: Serving, request: Request) -> Response:
    """POST /parse_function_call: the tool calls in a text, and the text without them"""
    call = await schemas.read_body(serving, request, ParseCallsBody)
    body = call.body

    def work() -> Response:
        given = [{"type": "function"} | tool for tool in body.tools]
        tools.check_functions(given)
        functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in given}
        form = _tool_format(serving, body.tool_call_parser)
        reply = parsed_calls(_segments(OutputFormat(form, None, functions), AnswerStart(), body.text))
        return json(reply, call.headers)

    return await call.run(work)


async def separate_reasoning(serving: Serving, request: Request) -> Response:
    """POST /separate_reasoning: the reasoning in a text, and the text without it"""
    call = await schemas.read_body(serving, request, SeparateReasoningBody)
    body = call.body
    if body.return_blocks:
        raise invalid("return_blocks", "is not supported: the reasoning is one text", code="unsupported")

    def work() -> Response:
        rows = (*serving.state_of(TextContext).plugin_rows.thinking, *THINKING)
        thinking: Thinking = _row(rows, REASONING_SYNONYMS, body.reasoning_parser, "reasoning_parser")
        segments = _segments(OutputFormat(None, thinking), AnswerStart(thinking.assumed), body.text)
        reply = SeparatedReasoning(_joined(segments, "reasoning"), _joined(segments, "content"))
        return json(reply, call.headers)

    return await call.run(work)


def parsed_calls(segments: Sequence[Segment]) -> ParsedCalls:
    """The calls among the segments of an answer, and its content."""
    calls: list[ParsedCall] = []
    for kind, text in segments:
        if kind == "call":
            calls.append(ParsedCall(len(calls), text, ""))
        elif kind == "arguments":
            calls[-1].parameters += text
    return ParsedCalls(_joined(segments, "content"), calls)


def _segments(output_format: OutputFormat, start: AnswerStart, text: str) -> list[Segment]:
    """A whole answer.  A call that is not complete is content."""
    return Parser(output_format, start, whole_calls=True).push(text, final=True)


def _joined(segments: Sequence[Segment], kind: str) -> str:
    return "".join(text for of_kind, text in segments if of_kind == kind)


def _tool_format(serving: Serving, name: str | None) -> ToolFormat:
    """The format with this name, or else the server's.  Raises RequestError."""
    text = serving.state_of(TextContext)
    if name not in (None, "auto"):
        return _row((*text.plugin_rows.tools, *TOOL_FORMATS), TOOL_SYNONYMS, name, "tool_call_parser")
    if text.tool_format is None:
        raise RequestError(
            "tool_call_parser: is required, as this server has none of its own", field="tool_call_parser"
        )
    return text.tool_format


def _row(rows: Sequence[N], synonyms: Mapping[str, str], name: str, field: str) -> N:
    """The row with a name, or with another server's name of the same.  Raises RequestError."""
    row = next((row for row in rows if row.name == synonyms.get(name, name)), None)
    if row is None:
        known = ", ".join(row.name for row in rows)
        raise invalid(field, f"must be one of {known}, got {name[:LONGEST_SHOWN]!r}")
    return row
