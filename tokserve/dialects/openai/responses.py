"""The Responses API: turns a request into a chat body, and the answer into typed items and events.

Responses are not stored, so a request has its whole conversation.  `chat` implements the fields of the chat body; the
fields of errors are translated back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import NotFound, RequestError, invalid
from tokserve.client.outputs import ChoiceOutput
from tokserve.dialects.openai import chat, schemas, tools
from tokserve.dialects.openai.chat import ChatCall
from tokserve.dialects.openai.response_history import InputMessages
from tokserve.dialects.openai.response_items import Item, OutputItems
from tokserve.dialects.openai.response_tools import ChatTools, ToolTable
from tokserve.dialects.openai.schemas import ChatBody, GeneratingBody, ResponsesBody
from tokserve.features.chat.output_format import OutputFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.text_context import TextContext
from tokserve.server.generation import Generation
from tokserve.server.http import body, errors
from tokserve.server.replies import logprobs, sse
from tokserve.server.replies.reply_fields import StopDetail, WeightVersion, versions
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.replies.reply_parts import DeferredParts
from tokserve.server.request_starter import FieldPaths
from tokserve.server.serving import Serving

ID_PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"
ENCODED = "reasoning.encrypted_content"
INCLUDED = (LOGPROBS, ENCODED)
MESSAGE = re.compile(r"messages\[(\d+)\]")
NAMES = {  # fields of chat, longer ones first, and their names here
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesCall(NamedTuple):
    """A request as a chat.  `tools`: its tools, and what the functions of the chat stand for; `raw`: as of
    `ChatTools`."""

    body: ResponsesBody
    chat: ChatCall
    tools: ToolTable
    raw: str | None


class InputDetails(msgspec.Struct):
    """Cached tokens of the prompt; writing to the cache is not charged."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Tokens of the reasoning, with its markers."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """The error that ended a stream; `code` is one of OpenAI's."""

    code: str
    message: str
    type: str
    param: str | None


class IncompleteDetails(msgspec.Struct):
    """Why an answer is incomplete; null is a reason that OpenAI does not have, which is in `stop_detail`."""

    reason: str | None


class ResponsesReply(msgspec.Struct, kw_only=True):
    """The response so far.  It repeats those fields of the request that OpenAI's repeats."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    metadata: dict[str, str]
    stop_reason: int | str | list[int] | UnsetType | None = UNSET
    stop_detail: StopDetail | UnsetType = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    weight_version: str | UnsetType | None = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET


async def create_response(serving: Serving, request: Request) -> Response:
    """POST /v1/responses: a response with typed items, not stored"""
    responses_call = await read_response(serving, request)
    call = responses_call.chat
    generation = await serving.requests.start(request, call.generate, [call.prompt], call.fields)
    if call.turn is not None:
        call.turn.attach(generation, lambda choice: returned_message(serving, generation, responses_call, choice))
    render = ResponsesRenderer(serving, generation, responses_call)
    return await sse.respond(
        generation, request, render, call.route.headers, opening=render.opening, close=render.close
    )


def returned_message(
    serving: Serving, generation: Generation, responses_call: ResponsesCall, choice: ChoiceOutput
) -> dict[str, Any]:
    """The message that the items of a whole answer become when the client sends them back."""
    items = ResponsesRenderer(serving, generation, responses_call).reply([choice]).output
    conversation = InputMessages(ToolTable())
    for index, item in enumerate(items):
        conversation.add(f"output[{index}]", msgspec.to_builtins(item))
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for one in conversation.messages:  # there is one
        message |= one
    return message


async def stored(serving: Serving, request: Request) -> Response:
    """404: responses are not stored"""
    raise NotFound(
        "this server does not store responses, so none can be fetched, deleted or cancelled. A stream ends when its "
        "connection is closed, and /abort_requests ends a request by its id",
        code="not_stored",
    )


async def read_response(serving: Serving, request: Request, *, replies: bool = True) -> ResponsesCall:
    """The body, and the chat call made from it; errors name the fields of the body.  `replies`: see `read_chat`."""
    route = await schemas.read_body(serving, request, ResponsesBody)
    request_body = route.body
    schemas.check_stream(request_body, replies and route.wants_msgpack)
    if isinstance(request_body.input, list):
        serving.state_of(TextContext).check_messages(request_body.input, "input")
    table = ToolTable()
    conversation = InputMessages(table)

    def converse() -> tuple[ChatTools, ChatBody]:
        table.add_all("tools", request_body.tools or [])
        _add_input(request_body, conversation)
        chat_tools = table.for_chat(request_body.tool_choice)
        as_chat = _as_chat(request_body, conversation, chat_tools, serving.config.model.return_sampling_mask)
        tools.check_tools(as_chat.tools, as_chat.tool_choice)
        return chat_tools, as_chat

    try:
        chat_tools, as_chat = await route.run(converse)
        left_out = table.left_out + conversation.left_out
        if left_out and serving.config.server.strict:
            raise invalid(f"{left_out[0]}.type", "is one that only OpenAI's servers can use", code="unsupported")
        call = await chat.call_of(route.replaced(as_chat, []), replies=replies)
    except RequestError as error:
        if error.field is not None:
            errors.renamed(error, _responses_field(error.field, conversation.fields, table))
        raise
    others = {name: _responses_field(field, (), table) for name, field in call.fields.others.items()}
    if table.grammar_field is not None:
        others["structured_outputs"] = table.grammar_field
    ignored = route.ignored + [_responses_field(name, (), table) for name in call.route.ignored] + left_out
    route_of_chat = call.route.replaced(call.route.body, ignored)
    call = call._replace(route=route_of_chat, fields=FieldPaths("input", others=others))
    return ResponsesCall(request_body, call, table, chat_tools.raw)


def _add_input(request_body: ResponsesBody, conversation: InputMessages) -> None:
    if request_body.input is None:
        raise invalid("input", "is required")
    if not request_body.input and isinstance(request_body.input, list):
        raise invalid("input", "must not be empty")
    if request_body.instructions is not None:
        conversation.append("instructions", {"role": "system", "content": request_body.instructions})
    if isinstance(request_body.input, str):
        conversation.append("input", {"role": "user", "content": request_body.input})
    else:
        for i, item in enumerate(request_body.input):
            conversation.add(f"input[{i}]", item)


def _as_chat(
    request_body: ResponsesBody, conversation: InputMessages, chat_tools: ChatTools, masks_by_default: bool
) -> ChatBody:
    """The equivalent chat body, without sampling masks.  Its fields have been checked in this body."""
    text = request_body.text or schemas.TextOptions()
    included = request_body.include or []
    for i, name in enumerate(included):
        if name not in INCLUDED:
            errors.refuse_unsupported(f"include[{i}]", name)
    with_logprobs = LOGPROBS in included
    if request_body.top_logprobs and not with_logprobs:
        raise invalid("top_logprobs", f'needs "{LOGPROBS}" in include')
    text_format = text.format
    if request_body.structured_outputs is not None and text_format not in (None, {"type": "text"}):
        raise RequestError("give structured_outputs or text.format, not both", field="text.format")
    if text_format is not None and text_format.get("type") == "json_schema":
        text_format = {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type"}}
    generating = {name: getattr(request_body, name) for name in GeneratingBody.model_fields}
    if chat_tools.grammar is not None:  # the call is forced, so there is no answer of another form
        text_format, generating["structured_outputs"] = None, {"grammar": chat_tools.grammar}
    return ChatBody.model_construct(
        **generating,
        messages=conversation.messages,
        max_completion_tokens=request_body.max_output_tokens,
        return_sampling_mask=False if masks_by_default else None,
        logprobs=with_logprobs,
        top_logprobs=request_body.top_logprobs,
        response_format=text_format,
        tools=chat_tools.functions,
        tool_choice=chat_tools.choice,
        parallel_tool_calls=request_body.parallel_tool_calls,
        max_tool_calls=request_body.max_tool_calls,
        reasoning_effort=request_body.reasoning.effort if request_body.reasoning else None,
        chat_template_kwargs=request_body.chat_template_kwargs,
        session_id=(request_body.model_extra or {}).get("session_id"),
    )


def _responses_field(field: str, input_fields: Sequence[str], table: ToolTable) -> str:
    """The field of the Responses body for a field of chat."""
    match = MESSAGE.match(field)
    if match:
        message = input_fields[int(match[1])]
        return message if message in ("instructions", "input") else message + field[match.end() :]
    if table.grammar_field is not None and field.startswith("structured_outputs"):
        return table.grammar_field
    field = table.field_of(field)
    for chat_name, name in NAMES.items():
        if field == chat_name or field.startswith((chat_name + ".", chat_name + "[")):
            return name + field[len(chat_name) :]
    return field


def _ignore_event(name: str, fields: dict[str, Any]) -> None:
    """The event sink of replies that are not streamed."""


class ResponsesRenderer:
    """Renders one answer as JSON, or as typed events."""

    def __init__(self, serving: Serving, generation: Generation, responses_call: ResponsesCall) -> None:
        request_body, call = responses_call.body, responses_call.chat
        self._generation = generation
        self._model = serving.model.answers_as(request_body.model)
        self._body = request_body
        self._call = call
        self._created = int(time.time())
        self._spelling = logprobs.Spelling(serving.tokenizer, schemas.shows_ids(serving, request_body))
        params, plan = call.params, call.plan
        self._with_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        output_format = plan.output_format or OutputFormat()
        parser = Parser(output_format, call.start)
        pieces = serving.tokenizer.pieces(params.skip_special_tokens)
        offset = logprobs.TextOffset(pieces) if self._with_logprobs or output_format.thinking else None
        emit = self._emit if request_body.stream else _ignore_event
        self._output = OutputItems(
            generation.key,
            tools.call_key(generation),
            parser,
            offset,
            emit,
            responses_call.tools.served,
            responses_call.raw,
            encoded=ENCODED in (request_body.include or ()),
            summarized=(request_body.reasoning or schemas.ReasoningOptions()).summary is not None,
        )
        self._token_ids: list[int] = []
        self._last: ChoiceOutput | None = None
        self._events: list[bytes] = []
        self._num_events = 0

    def reply(self, choices: list[ChoiceOutput], parts: DeferredParts | None = None) -> ResponsesReply:
        """The whole reply.  There is one choice, and no value is deferred: items include their logprobs."""
        for completion in choices:  # there is one
            self._push(completion)
        return self._final_reply()

    def opening(self) -> bytes:
        for name in ("created", "in_progress"):
            self._emit(name, {"response": self._reply()})
        return self._take_events()

    def delta(self, delta: ChoiceOutput) -> bytes:
        self._push(delta)
        return self._take_events()

    def tail(self) -> bytes:
        """No events: `close` makes the last ones."""
        return b""

    def close(self, error: RequestError | None) -> bytes:
        """The last event, with the whole response."""
        reply = self._final_reply() if error is None else self._failed_reply(error)
        self._emit(reply.status, {"response": reply})
        return self._take_events()

    def _push(self, c: ChoiceOutput) -> None:
        last = c.finish_reason is not None
        if self._body.return_token_ids:
            self._token_ids += c.token_ids
        entries = None
        if self._with_logprobs:
            entries = logprobs.content(c.logprobs or logprobs.NO_ROWS, c.token_ids, self._spelling).content
        self._output.push(c.text or "", c.token_ids, entries, final=last)
        if last:
            self._last = c
            self._output.end(complete=c.finish_reason == "stop")

    def _final_reply(self) -> ResponsesReply:
        c = self._last
        assert c is not None
        reply = self._reply()
        reply.status = "completed" if c.finish_reason == "stop" else "incomplete"
        if reply.status == "completed":
            reply.completed_at = int(time.time())
        else:
            reply.incomplete_details = IncompleteDetails("max_output_tokens" if c.finish_reason == "length" else None)
        reply.output = self._output.items
        reply.usage = self._usage()
        reply.stop_reason, reply.stop_detail = c.stop_reason, StopDetail(c.stop_detail, c.message)
        reply.system_fingerprint, reply.metrics = self._generation.fingerprint, self._generation.metrics()
        if self._body.return_token_ids:
            reply.prompt_token_ids, reply.token_ids = self._generation.prompt_ids(), self._token_ids
            reply.weight_versions = versions(c)
            reply.weight_version = reply.weight_versions[-1].version if reply.weight_versions else None
        return reply

    def _failed_reply(self, error: RequestError) -> ResponsesReply:
        if self._last is None and self._output.items:
            self._output.end(complete=False)
        reply = self._reply()
        code = "invalid_prompt" if error.status < 500 else "server_error"
        reply.status, reply.error = "failed", ResponseError(code, error.message, error.type, error.field)
        reply.output, reply.usage = self._output.items, self._usage()
        return reply

    def _usage(self) -> ResponsesUsage:
        usage = self._generation.usage()
        return ResponsesUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(self._output.reasoning_tokens),
            usage.total_tokens,
        )

    def _reply(self) -> ResponsesReply:
        request, params = self._body, self._call.params
        form = request.text.format if request.text else None
        reasoning = request.reasoning or schemas.ReasoningOptions()
        return ResponsesReply(
            id=ID_PREFIX + self._generation.key,
            created_at=self._created,
            model=self._model,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": reasoning.effort, "summary": reasoning.summary},
            temperature=params.temperature,
            text={"format": form or {"type": "text"}},
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=params.top_p,
            metadata=request.metadata or {},
        )

    def _emit(self, name: str, fields: dict[str, Any]) -> None:
        kind = f"response.{name}"
        numbered = {"type": kind, "sequence_number": self._num_events, **fields}
        self._events.append(f"event: {kind}\n".encode() + sse.event(body.encode_json(numbered)))
        self._num_events += 1

    def _take_events(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events
