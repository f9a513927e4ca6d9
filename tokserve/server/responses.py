"""The Responses API: a request as the chat that it is, and its answer as typed items and their events.

Nothing is stored, so a request brings its whole conversation.  What a chat does with its fields is `chat`'s business;
here fields change their names, those of errors as well, and answers their shape.  Nothing is generated here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tokserve.client.outputs import ChoiceOutput, Logprobs
from tokserve.errors import NotFound, RequestError
from tokserve.server import body, chat, errors, logprobs, schemas, sse, tools
from tokserve.server.chat import Call
from tokserve.server.generation import Generation
from tokserve.server.holes import Holes
from tokserve.server.items import Conversation, Item, Output
from tokserve.server.schemas import ChatBody, GeneratingBody, ResponsesBody
from tokserve.server.serving import FieldPaths, Serving
from tokserve.server.tokens import StopDetail, WeightVersion, versions
from tokserve.server.workers import off_loop
from tokserve.text.parsing import Parser, Reading

ID_PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # reasoning comes as it is, and is taken back so
MESSAGE = re.compile(r"messages\[(\d+)\]")
FUNCTION = re.compile(r"^(tools\[\d+\]|tool_choice)\.function\b")
NAMES = {  # chat's, longer ones first, and what they are here
    "response_format.json_schema": "text.format", "response_format": "text.format", "messages": "input",
    "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip


class InputDetails(msgspec.Struct):
    """The part of the prompt that was not computed again; nothing is ever charged for writing to the cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """The part of the answer that is reasoning, its markers included."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Failure(msgspec.Struct):
    """What a stream ended in; `code` is one of OpenAI's."""

    code: str
    message: str
    type: str
    param: str | None


class Incomplete(msgspec.Struct):
    """Why an answer is not complete; null is a reason that OpenAI has not: `stop_detail` says it."""

    reason: str | None


class Reply(msgspec.Struct, kw_only=True):
    """The response as it stands.  Of the request it repeats what OpenAI's does."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
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
    usage: Usage | None = None
    metadata: dict[str, str]
    stop_reason: int | str | list[int] | UnsetType | None = UNSET
    stop_detail: StopDetail | UnsetType = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    weight_version: str | UnsetType | None = UNSET


async def create(serving: Serving, request: Request) -> Response:
    """POST /v1/responses"""
    asked, call = await read(serving, request)
    generation = await serving.start(request, call.generate, [call.prompt], call.fields)
    render = Render(serving, generation, asked, call)
    headers = {"X-Request-Id": call.generate.request_id, **schemas.ignored_header(call.ignored)}
    if call.generate.options.stream:
        return sse.EventStream(
            generation, render, serving.keep_alive, headers, opening=render.opening(), close=render.close
        )
    return await sse.answer(generation, request, render.reply, headers)


async def stored(serving: Serving, request: Request) -> Response:
    """A response by its id: there is none"""
    raise NotFound(
        "this server stores no responses: there is none to fetch, delete or cancel. A stream ends when its "
        "connection is closed, and /abort_requests ends a request by its id",
        code="not_stored",
    )


async def read(serving: Serving, request: Request) -> tuple[ResponsesBody, Call]:
    """The body, and the chat that it is; errors name the body's own fields."""
    asked, ignored, size = await schemas.read(serving, request, ResponsesBody)
    schemas.check_stream(asked, body.wants_msgpack(request))
    if isinstance(asked.input, list):
        serving.check_messages(asked.input, "input")
    conversation = Conversation()

    def converse() -> ChatBody:
        _converse(asked, conversation)
        as_chat = _as_chat(asked, conversation)
        tools.check(as_chat.tools, as_chat.tool_choice)
        return as_chat

    try:
        as_chat = await off_loop(request, size, converse)
        call = await chat.call_of(serving, request, as_chat, [], size)
    except RequestError as error:
        raise _renamed(error, conversation.places) from None
    fields = FieldPaths("input", others={name: _here(theirs, ()) for name, theirs in call.fields.others.items()})
    return asked, call._replace(ignored=ignored + [_here(name, ()) for name in call.ignored], fields=fields)


def _converse(asked: ResponsesBody, conversation: Conversation) -> None:
    """Add the body's input to the conversation."""
    if asked.input is None:
        raise RequestError("input is required", field="input")
    if not asked.input and isinstance(asked.input, list):
        raise RequestError("input must not be empty", field="input")
    if asked.instructions is not None:
        conversation.say("instructions", {"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        conversation.say("input", {"role": "user", "content": asked.input})
    else:
        for i, item in enumerate(asked.input):
            conversation.add(f"input[{i}]", item)


def _as_chat(asked: ResponsesBody, conversation: Conversation) -> ChatBody:
    """The chat body that asks for the same.  Its fields have been checked as those of this one."""
    text = asked.text or schemas.TextOptions()
    included = asked.include or []
    for i, name in enumerate(included):
        if name not in INCLUDED:
            errors.refuse_unsupported(f"include[{i}]", name)
    wanted = LOGPROBS in included
    if asked.top_logprobs and not wanted:
        raise RequestError(f'top_logprobs needs "{LOGPROBS}" in include', field="top_logprobs")
    form = text.format
    if asked.structured_outputs is not None and form not in (None, {"type": "text"}):
        raise RequestError("give structured_outputs or text.format, not both", field="text.format")
    if form is not None and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    as_chat: ChatBody = ChatBody.model_construct(
        **{name: getattr(asked, name) for name in GeneratingBody.model_fields},
        messages=conversation.messages,
        max_completion_tokens=asked.max_output_tokens,
        logprobs=wanted,
        top_logprobs=asked.top_logprobs,
        response_format=form,
        tools=None if asked.tools is None else [_nested(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)],
        tool_choice=_nested("tool_choice", asked.tool_choice) if _names(asked.tool_choice) else asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls,
        max_tool_calls=asked.max_tool_calls,
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    return as_chat


def _names(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function"


def _nested(where: str, flat: dict[str, Any]) -> dict[str, Any]:
    """A function, or the choice of one, as chat has it."""
    if flat.get("type") != "function":
        reason = "it has functions only, no tools of its own"
        errors.refuse_unsupported(f"{where}.type", flat.get("type"), reason=reason)
        raise RequestError(f"{where}.type must be 'function'", field=f"{where}.type")
    return {"type": "function", "function": {name: value for name, value in flat.items() if name != "type"}}


def _renamed(error: RequestError, places: Sequence[str]) -> RequestError:
    """The error of a chat body, with the field as it is called here."""
    if error.field is not None:
        theirs, error.field = error.field, _here(error.field, places)
        if error.message.startswith(theirs):
            error.message = error.field + error.message[len(theirs) :]
    return error


def _here(field: str, places: Sequence[str]) -> str:
    """A field of chat as it is called here."""
    found = MESSAGE.match(field)
    if found:
        return places[int(found[1])] + field[found.end() :]
    field = FUNCTION.sub(r"\1", field)
    for theirs, ours in NAMES.items():
        if field == theirs or field.startswith((theirs + ".", theirs + "[")):
            return ours + field[len(theirs) :]
    return field


def _unheard(name: str, fields: dict[str, Any]) -> None:
    """Of a whole answer nobody wants the events."""


class Render:
    """One answer as JSON, or as typed events."""

    def __init__(self, serving: Serving, generation: Generation, asked: ResponsesBody, call: Call) -> None:
        self._generation = generation
        self._model = serving.answers_as(asked.model)
        self._asked = asked
        self._call = call
        self._created = int(time.time())
        self._spelling = logprobs.Spelling(serving.tokenizer, bool(asked.return_tokens_as_token_ids))
        params, plan = call.params, call.plan
        self._wanted = params.logprobs is not None or bool(params.logprob_token_ids)
        reading = plan.reading or Reading()
        parser = Parser(reading, inside=plan.inside(serving.tokenizer, call.prompt))
        pieces = serving.tokenizer.pieces(params.skip_special_tokens)
        place = logprobs.Place(pieces) if self._wanted or reading.thinking else None
        self._output = Output(generation.key, parser, place, self._tell if asked.stream else _unheard)
        self._token_ids: list[int] = []
        self._last: ChoiceOutput | None = None
        self._events: list[bytes] = []
        self._num_events = 0

    def reply(self, done: list[ChoiceOutput], holes: Holes | None = None) -> Reply:
        """The whole answer.  There is one choice, whose logprobs are made with its items: nothing is made later."""
        for completion in done:  # there is one
            self._push(completion)
        return self._ended()

    def opening(self) -> bytes:
        """The events before there is anything."""
        for name in ("created", "in_progress"):
            self._tell(name, {"response": self._reply()})
        return self._taken()

    def delta(self, delta: ChoiceOutput) -> bytes:
        """The events of a delta."""
        self._push(delta)
        return self._taken()

    def tail(self) -> bytes:
        """Nothing: `close` tells the end."""
        return b""

    def close(self, error: RequestError | None) -> bytes:
        """The last event, which has the whole response."""
        reply = self._ended() if error is None else self._failed(error)
        self._tell(reply.status, {"response": reply})
        return self._taken()

    def _push(self, c: ChoiceOutput) -> None:
        last = c.finish_reason is not None
        if self._asked.return_token_ids:
            self._token_ids += c.token_ids
        shown = (
            logprobs.content(c.logprobs or Logprobs(), c.token_ids, self._spelling).content if self._wanted else None
        )
        self._output.push(c.text or "", c.token_ids, shown, final=last)
        if last:
            self._last = c
            self._output.end(complete=c.finish_reason == "stop")

    def _ended(self) -> Reply:
        """The response with what its answer has come to."""
        c = self._last
        assert c is not None
        reply = self._reply()
        reply.status = "completed" if c.finish_reason == "stop" else "incomplete"
        if reply.status == "completed":
            reply.completed_at = int(time.time())
        else:
            reply.incomplete_details = Incomplete("max_output_tokens" if c.finish_reason == "length" else None)
        reply.output = self._output.items
        reply.usage = self._usage()
        reply.stop_reason, reply.stop_detail = c.stop_reason, StopDetail(c.stop_detail, c.message)
        reply.system_fingerprint = self._generation.fingerprint
        if self._asked.return_token_ids:
            reply.prompt_token_ids, reply.token_ids = self._generation.prompt_ids(), self._token_ids
            reply.weight_versions = versions(c)
            reply.weight_version = reply.weight_versions[-1].version if reply.weight_versions else None
        return reply

    def _failed(self, error: RequestError) -> Reply:
        if self._last is None and self._output.items:
            self._output.end(complete=False)
        reply = self._reply()
        code = "invalid_prompt" if error.status < 500 else "server_error"
        reply.status, reply.error = "failed", Failure(code, error.message, error.type, error.field)
        reply.output, reply.usage = self._output.items, self._usage()
        return reply

    def _usage(self) -> Usage:
        usage = self._generation.usage()
        return Usage(
            usage.prompt_tokens, InputDetails(usage.prompt_tokens_details.cached_tokens), usage.completion_tokens,
            OutputDetails(self._output.reasoning_tokens), usage.total_tokens,
        )  # fmt: skip

    def _reply(self) -> Reply:
        asked, params = self._asked, self._call.params
        form = asked.text.format if asked.text else None
        return Reply(
            id=ID_PREFIX + self._generation.key, created_at=self._created, model=self._model,
            instructions=asked.instructions, max_output_tokens=asked.max_output_tokens,
            max_tool_calls=asked.max_tool_calls, parallel_tool_calls=asked.parallel_tool_calls is not False,
            reasoning={"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            temperature=params.temperature, text={"format": form or {"type": "text"}},
            tool_choice=asked.tool_choice or "auto", tools=asked.tools or [], top_logprobs=asked.top_logprobs or 0,
            top_p=params.top_p, metadata=asked.metadata or {},
        )  # fmt: skip

    def _tell(self, name: str, fields: dict[str, Any]) -> None:
        kind = f"response.{name}"
        numbered = {"type": kind, "sequence_number": self._num_events, **fields}
        self._events.append(f"event: {kind}\n".encode() + sse.event(body.encode_json(numbered)))
        self._num_events += 1

    def _taken(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events
