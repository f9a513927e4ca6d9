"""Anthropic's Messages API: turns a request into a chat body, and the answer into blocks and events.

`chat` implements the fields of the chat body; the fields of errors are translated back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.dialects.anthropic.bodies import CountTokensBody, JsonOutputOptions, MessagesBody
from tokserve.dialects.anthropic.conversation import TurnMessages
from tokserve.dialects.anthropic.reply import MessagesRenderer, returned_message
from tokserve.dialects.anthropic.tool_list import ToolList
from tokserve.dialects.openai import chat, chat_prompts, schemas, tools
from tokserve.dialects.openai import render as token_requests
from tokserve.dialects.openai.chat import ChatCall
from tokserve.dialects.openai.schemas import ChatBody
from tokserve.features.chat.text_context import TextContext
from tokserve.server.http import errors
from tokserve.server.replies import sse
from tokserve.server.request_starter import FieldPaths
from tokserve.server.serving import Serving

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TOOL = re.compile(r"tools\[(\d+)\]")
MESSAGE = re.compile(r"messages\[(\d+)\]")
NAMES = {  # fields of chat, longer ones first, and their names here
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}
SHARED = tuple(name for name in MessagesBody.model_fields if name in ChatBody.model_fields)


class ContextManagement(msgspec.Struct):
    """What count_tokens says of a conversation of which nothing is cleared."""

    original_input_tokens: int


class TokenCount(msgspec.Struct):
    """The reply of count_tokens."""

    input_tokens: int
    context_management: ContextManagement


class ChatPaths(NamedTuple):
    """The paths in this body of a chat body's messages and tools."""

    messages: Sequence[str] = ()
    tools: Sequence[str] = ()


class ChatRequest(NamedTuple):
    """A body as a chat body.  `fields`: where its parts are in this one; `ignored`: fields without an effect here."""

    body: ChatBody
    fields: ChatPaths
    ignored: list[str]


async def create_message(serving: Serving, request: Request) -> Response:
    """POST /v1/messages: a message in the format of Anthropic's API"""
    call = await read_messages(serving, request)
    generation = await serving.requests.start(request, call.generate, [call.prompt], call.fields)
    if call.turn is not None:
        call.turn.attach(generation, lambda choice: returned_message(generation, call, choice))
    renderer = MessagesRenderer(serving, generation, call)
    headers = {"request-id": generation.request_id, **call.route.headers}
    return await sse.respond(generation, request, renderer, headers, close=renderer.close)


async def count_tokens(serving: Serving, request: Request) -> Response:
    """POST /v1/messages/count_tokens: the number of tokens of the prompt"""
    route = await schemas.read_body(serving, request, CountTokensBody)
    converted = await route.run(lambda: _as_chat(serving, route.body))
    as_chat = route.replaced(converted.body, route.ignored + converted.ignored)
    try:
        prompt = await chat_prompts.prompt_of(as_chat, converted.body.reasoning_effort)
    except RequestError as error:
        raise _with_messages_field(error, converted.fields) from None
    tokens = len(prompt.ids) // 4
    return as_chat.reply(TokenCount(tokens, ContextManagement(tokens)))


async def render(serving: Serving, request: Request) -> Response:
    """POST /v1/messages/render: the messages as a token request"""
    return await token_requests.rendered_chat(await read_messages(serving, request, replies=False))


async def read_messages(serving: Serving, request: Request, *, replies: bool = True) -> ChatCall:
    """The chat call made from the body; errors name the fields of the body."""
    route = await schemas.read_body(serving, request, MessagesBody)
    sse.check_format(route.body.stream, replies and route.wants_msgpack)
    converted = await route.run(lambda: _as_chat(serving, route.body))
    try:
        call = await chat.call_of(route.replaced(converted.body, converted.ignored), replies=replies)
    except RequestError as error:
        raise _with_messages_field(error, converted.fields) from None
    others = {name: _messages_field(field, ChatPaths()) for name, field in call.fields.others.items()}
    fields = FieldPaths("messages", others=others | {"stop": "stop_sequences"})
    ignored = route.ignored + [_messages_field(name, ChatPaths()) for name in call.route.ignored]
    return call._replace(route=call.route.replaced(converted.body, ignored), fields=fields)


def _as_chat(serving: Serving, request_body: CountTokensBody) -> ChatRequest:
    """The equivalent chat body.  Raises RequestError naming a field of this one."""
    if not request_body.model:
        raise invalid("model", "is required")
    if not request_body.messages:
        raise invalid("messages", "must not be empty")
    text = serving.state_of(TextContext)
    text.check_messages(request_body.messages, "messages")
    tool_list = ToolList(request_body.tools)
    conversation = TurnMessages(tool_list, system_stays=text.takes_later_system)
    if request_body.system is not None:
        conversation.add_system(request_body.system)
    for i, turn in enumerate(request_body.messages):
        conversation.add(f"messages[{i}]", turn)
    effort, variables, ignored = _thinking(serving, request_body)
    choice = request_body.tool_choice
    fields: dict[str, Any] = {name: getattr(request_body, name) for name in SHARED if hasattr(request_body, name)}
    fields |= {
        "messages": conversation.messages(),
        "tools": tool_list.shown(),
        "tool_choice": _tool_choice(request_body),
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        "reasoning_effort": effort,
        "chat_template_kwargs": variables | (request_body.chat_template_kwargs or {}),
        "response_format": _response_format(request_body),
        "continue_final_message": conversation.is_to_be_continued or None,
        "session_id": (request_body.model_extra or {}).get("session_id"),
    }
    if isinstance(request_body, MessagesBody):
        if request_body.max_tokens < 1:  # chat has a number for no limit
            raise invalid("max_tokens", f"must be at least 1, got {request_body.max_tokens}")
        fields |= {"stop": request_body.stop_sequences}
        budget = _budget(serving, request_body)
        fields |= {} if budget is None else {"thinking_token_budget": budget}
        fields |= {"return_sampling_mask": False} if serving.config.model.return_sampling_mask else {}
    if conversation.is_to_be_continued and fields["response_format"] is not None:
        field = "output_config.format" if request_body.output_format is None else "output_format"
        raise RequestError(
            f"{field}: applies to a whole answer, and a final message of the assistant is already part of it",
            field=field,
        )
    tools.check_tools(fields["tools"], fields["tool_choice"])
    return ChatRequest(
        ChatBody.model_construct(**fields), ChatPaths(conversation.fields, tool_list.shown_fields()), ignored
    )


def _tool_choice(request_body: CountTokensBody) -> str | dict[str, Any] | None:
    choice = request_body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return CHOICES[choice.type]
    if not choice.name:
        raise invalid("tool_choice.name", "is required")
    return {"type": "function", "function": {"name": choice.name}}


def _thinking(serving: Serving, request_body: CountTokensBody) -> tuple[str | None, dict[str, Any], list[str]]:
    """The effort of the reasoning, variables of the template, and the fields that change nothing."""
    thinking, output = request_body.thinking, request_body.output_config
    effort = output.effort if output else None
    if thinking is None or thinking.type == "adaptive":
        return effort, {}, []
    if thinking.type == "disabled":
        return "none", {}, []
    if thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens", "is required")
    if isinstance(request_body, MessagesBody) and thinking.budget_tokens >= request_body.max_tokens:
        raise invalid("thinking.budget_tokens", f"must be below max_tokens ({request_body.max_tokens})")
    text = serving.state_of(TextContext)
    ignored = [] if text.thinking is not None else ["thinking.budget_tokens"]
    if text.thinking is None and not text.template.reads("enable_thinking"):
        ignored.insert(0, "thinking")
    return effort, {"enable_thinking": True}, ignored


def _budget(serving: Serving, request_body: MessagesBody) -> int | None:
    """The most tokens of reasoning, where the server can tell it apart."""
    thinking = request_body.thinking
    if thinking is None or thinking.type != "enabled" or serving.state_of(TextContext).thinking is None:
        return None
    return thinking.budget_tokens


def _response_format(request_body: CountTokensBody) -> dict[str, Any] | None:
    """The form of the answer, with closed objects, as Anthropic's API demands."""
    output, older = request_body.output_config, request_body.output_format
    form: JsonOutputOptions | None = output.format if output else None
    if form is not None and older is not None:
        raise RequestError("give output_config.format or output_format, not both", field="output_format")
    form = form or older
    if form is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_, "strict": True}}


def _with_messages_field(error: RequestError, paths: ChatPaths) -> RequestError:
    """The error of a chat body with the field of this body."""
    if error.field is None or error.has_final_path:  # a final path has no place in the chat body
        return error
    return errors.renamed(error, _messages_field(error.field, paths))


def _messages_field(field: str, paths: ChatPaths) -> str:
    """The field of this body for a field of chat."""
    match = MESSAGE.match(field)
    if match:
        return paths.messages[int(match[1])] + field[match.end() :]
    tool = TOOL.match(field)
    if tool:
        rest = field[tool.end() :].removeprefix(".function")
        return paths.tools[int(tool[1])] + rest.replace(".parameters", ".input_schema", 1)
    for chat_name, name in NAMES.items():
        if field == chat_name or field.startswith((chat_name + ".", chat_name + "[")):
            return name + field[len(chat_name) :]
    return field
