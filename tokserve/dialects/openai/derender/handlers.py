"""The routes that derender: replies of /inference/v1/generate become those of chat and completions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import invalid
from tokserve.client.inputs import check_lists
from tokserve.dialects.openai import chat, chat_prompts, completions, schemas, tools
from tokserve.dialects.openai.derender.bodies import DerenderChatBody, DerenderCompletionBody
from tokserve.dialects.openai.derender.reader import ExternalReply, ReplyReader, with_prefix
from tokserve.dialects.openai.derender.streams import DerenderStream, derender_chunk
from tokserve.dialects.openai.schemas import ChatBody, CompletionBody, TextBody
from tokserve.dialects.openai.tools import ToolPlan
from tokserve.features.chat.output_format import AT_CONTENT
from tokserve.protocol.params import SamplingParams
from tokserve.server.serving import Serving

T = TypeVar("T", bound=TextBody)


async def derender_chat(serving: Serving, request: Request) -> Response:
    """POST /v1/chat/completions/derender: a generate reply as a chat reply"""
    route = await schemas.read_body(serving, request, DerenderChatBody)
    request_body = route.body
    if request_body.stream:
        if request_body.generate_response is not None:
            raise invalid("generate_response", "is for complete replies; with stream: true send generate_chunk")
        return await derender_chunk(route, partial(_chat_stream, serving, request_body))
    if request_body.generate_response is None:
        raise invalid("generate_response", "is required")
    text_body, plan, params = _chat_plan(serving, request_body.chat_request, route.ignored)

    def work() -> Response:
        sent, start = text_body or ChatBody(), AT_CONTENT

        def with_prompt(params: SamplingParams, prompt: list[int]) -> SamplingParams:
            nonlocal start
            start = chat.answer_start(serving, sent, plan, _prompt_of(serving, plan, prompt, sent))
            return plan.with_stops_after(params, start)

        reader = ReplyReader(serving, params, bool(sent.return_token_ids), with_prompt)
        ids, count = request_body.prompt_token_ids, request_body.prompt_tokens
        reader.add(request_body.generate_response, "generate_response", ids, count, "")
        external = reader.external
        external.completion_tokens = sum(len(end.token_ids) for end in reader.ends)
        answers = chat.reader_of(serving, plan, external, reader.params, start)
        renderer = chat.ChatRenderer(serving, external, sent, reader.params, answers)
        return route.reply(renderer.reply(reader.ends))

    return await route.run(work)


def _chat_plan(
    serving: Serving, chat_request: Any, ignored: list[str]
) -> tuple[ChatBody | None, ToolPlan, SamplingParams | None]:
    """The chat that was rendered, how its outputs are parsed, and its parameters."""
    text_body = _request(serving, ChatBody, chat_request, "chat_request", ignored)
    if text_body is None:
        return None, tools.PLAIN_TEXT, None
    plan = with_prefix("chat_request", lambda: chat.tool_plan(serving, text_body))
    return text_body, plan, _params(serving, lambda: chat.sampling_params(serving, text_body, plan), "chat_request")


def _chat_stream(serving: Serving, sent: DerenderChatBody, request_id: str | None, index: int) -> DerenderStream:
    ignored: list[str] = []
    text_body, plan, params = _chat_plan(serving, sent.chat_request, ignored)
    rendered, start, prompt = text_body or ChatBody(), AT_CONTENT, sent.prompt_token_ids or []
    serving.check_ids(prompt, "prompt_token_ids")
    reader = ReplyReader(serving, params, needs_prompt=False)
    if text_body is not None:
        start = chat.answer_start(serving, rendered, plan, _prompt_of(serving, plan, prompt, rendered))
        reader.params = plan.with_stops_after(reader.params, start)
    external = _external(reader, request_id, index, prompt, sent.prompt_tokens)
    answers = chat.reader_of(serving, plan, external, reader.params, start)
    renderer = chat.ChatRenderer(serving, external, rendered, reader.params, answers)
    return DerenderStream(serving, sent, reader, external, renderer, index, ignored)


def _external(
    reader: ReplyReader, request_id: str | None, index: int, prompt: list[int], prompt_tokens: int | None
) -> ExternalReply:
    """The context of a choice's stream."""
    external = ExternalReply(request_id, max(reader.params.n, index + 1))
    external.prompts.append(prompt)
    external.prompt_tokens = len(prompt) or prompt_tokens or 0
    return external


async def derender_completions(serving: Serving, request: Request) -> Response:
    """POST /v1/completions/derender: the generate replies to a request's prompts as one reply"""
    route = await schemas.read_body(serving, request, DerenderCompletionBody)
    request_body = route.body
    replies = request_body.generate_responses
    if request_body.stream:
        if replies is not None:
            raise invalid("generate_responses", "is for complete replies; with stream: true send generate_chunk")
        return await derender_chunk(route, partial(_completion_stream, serving, request_body))
    if not replies:
        raise invalid("generate_responses", "must have a reply per prompt")
    for name in ("prompt_tokens", "prompt_token_ids"):
        entries = getattr(request_body, name)
        if entries is not None and len(entries) != len(replies):
            raise invalid(name, f"must have an entry per reply: {len(replies)}")
    text_body = _request(serving, CompletionBody, request_body.completion_request, "completion_request", route.ignored)
    params = None
    prompts: list[str | list[int]] = []
    if text_body is not None:
        params = _params(serving, lambda: completions.sampling_params(serving, text_body), "completion_request")
        prompts = _prompts(text_body, len(replies))

    def work() -> Response:
        needs_prompt = text_body is not None and bool(text_body.return_token_ids or text_body.echo)
        reader = ReplyReader(serving, params, needs_prompt)
        for i, reply in enumerate(replies):
            ids = None if request_body.prompt_token_ids is None else request_body.prompt_token_ids[i]
            count = None if request_body.prompt_tokens is None else request_body.prompt_tokens[i]
            reader.add(reply, f"generate_responses[{i}]", ids, count, f"[{i}]")
        ends, external = reader.ends, reader.external
        external.completion_tokens = sum(len(end.token_ids) for end in ends)
        texts = prompts or list(external.prompts)
        renderer = completions.CompletionRenderer(
            serving, external, text_body or CompletionBody(), reader.params, texts
        )
        return route.reply(renderer.reply(ends))

    return await route.run(work)


def _completion_stream(
    serving: Serving, sent: DerenderCompletionBody, request_id: str | None, index: int
) -> DerenderStream:
    """A stream of generate has one prompt, and so have the lists of the body."""
    ignored: list[str] = []
    text_body = _request(serving, CompletionBody, sent.completion_request, "completion_request", ignored)
    for name in ("prompt_tokens", "prompt_token_ids"):
        entries = getattr(sent, name)
        if entries is not None and len(entries) != 1:
            raise invalid(name, "must have one entry: a stream has one prompt")
    params, prompts = None, []
    if text_body is not None:
        for name in ("echo", "prompt_logprobs"):
            if getattr(text_body, name) not in (None, False):
                raise invalid(f"completion_request.{name}", "is not derendered in a stream", code="unsupported")
        params = _params(serving, lambda: completions.sampling_params(serving, text_body), "completion_request")
        prompts = _prompts(text_body, 1)
    [prompt] = sent.prompt_token_ids or [[]]
    serving.check_ids(prompt, "prompt_token_ids[0]")
    if text_body is not None and text_body.return_token_ids and not prompt:
        raise invalid("prompt_token_ids", "is required: the reply has to repeat the prompt")
    reader = ReplyReader(serving, params, needs_prompt=False)
    count = sent.prompt_tokens[0] if sent.prompt_tokens else None
    external = _external(reader, request_id, index, prompt, count)
    texts = prompts or [prompt]
    renderer = completions.CompletionRenderer(serving, external, text_body or CompletionBody(), reader.params, texts)
    return DerenderStream(serving, sent, reader, external, renderer, index, ignored)


def _request(serving: Serving, kind: type[T], value: Any, field: str, ignored: list[str]) -> T | None:
    """The request body that was rendered, if the client sends it."""
    if value is None:
        return None
    text_body, ignored_fields = with_prefix(
        field, lambda: schemas.parse(kind, value, strict=serving.config.server.strict)
    )
    with_prefix(field, lambda: serving.model.check(text_body.model))
    ignored += ignored_fields
    return text_body


def _params(serving: Serving, make: Callable[[], SamplingParams], field: str) -> SamplingParams:
    params = with_prefix(field, make)
    with_prefix(field, params.validate)
    with_prefix(field, lambda: check_lists(params, serving.config.limits, serving.llm.ready.vocab_size))
    return params


def _prompt_of(serving: Serving, plan: ToolPlan, ids: list[int], text_body: ChatBody) -> list[int]:
    """The prompt's ids, rendered from the messages if they are missing and needed: they show how the output begins."""
    thinking = plan.output_format is not None and plan.output_format.thinking is not None
    if ids or not thinking or text_body.messages is None:
        return ids
    return with_prefix("chat_request", lambda: chat_prompts.rendered(serving, text_body, text_body.reasoning_effort))


def _prompts(text_body: CompletionBody, count: int) -> list[str | list[int]]:
    """The prompts of the request, as texts or ids; empty if it has none."""
    if text_body.prompt is None:
        return []
    prompts = with_prefix("completion_request", lambda: completions.parse_prompts(text_body.prompt))
    if len(prompts) != count:
        raise invalid("generate_responses", f"must have a reply per prompt: {len(prompts)}, got {count}")
    return prompts
