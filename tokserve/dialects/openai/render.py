"""Chat and completions bodies rendered as token requests, for this or another server to generate.

A rendered request is a body for /inference/v1/generate that yields the same tokens as the text route would, here or
on a tokens-only server of the same model (except for stop strings, which need a tokenizer).  Generates nothing;
`derender` is the inverse, for the replies.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.client.inputs import GenerateRequest
from tokserve.dialects.openai import chat, chat_prompts, completions, inline_messages, render_extras, responses, schemas
from tokserve.features.beams.beam_fields import refuse_beams
from tokserve.features.chat.text_context import TextContext
from tokserve.features.images import request_images
from tokserve.features.images.server_images import ServerImages
from tokserve.protocol.params import SamplingParams
from tokserve.server.http import declared
from tokserve.server.http.body import RENDERED, given_request_id, reply
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving
from tokserve.server.tokens.generate_body import OptionFields, StreamOptions


class Rendered(OptionFields, kw_only=True, omit_defaults=True):
    """A body for /inference/v1/generate; defaults are left out."""

    token_ids: list[int]
    sampling_params: SamplingParams
    model: str
    request_id: str | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    features: Any = None
    token_offsets: list[list[int]] | None = None
    prompt_text: str | None = None
    assistant_tokens_mask: list[int] | None = None
    parse_context: dict[str, Any] | None = None


class TokenizerDescription(msgspec.Struct):
    """What a client needs to know of the tokenizer, without paths."""

    tokenizer_class: str | None
    vocab_size: int
    special_tokens: dict[str, str]
    special_token_ids: list[int]
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    eos_token_ids: list[int]
    model_max_length: int
    chat_template: str | dict[str, str] | None


async def render_chat(serving: Serving, request: Request) -> Response:
    """POST /v1/chat/completions/render: the chat as a token request"""
    return await rendered_chat(await chat.read_chat(serving, request, replies=False))


async def rendered_chat(call: chat.ChatCall) -> Response:
    """The token request that a chat call is; the call may come from the body of another route."""
    route, serving, body = call.route, call.route.serving, call.route.body
    refuse_beams(call.beams)
    forbidden = await serving.requests.check(route.request, call.generate, [call.prompt], call.fields)
    echo = bool(body.return_token_ids) or call.params.prompt_logprobs is not None
    request_id = _request_id(route)
    params = _portable(call.params, forbidden)
    rendered = _rendered(serving, body, params, call.generate, call.ids, echo=echo, request_id=request_id)
    rendered.parse_context = inline_messages.parse_context(serving, body)
    if render_extras.asked_for(body):
        extras = await route.run(lambda: _chat_extras(call), 8 * len(call.ids))
        rendered = msgspec.structs.replace(rendered, **extras._asdict())
    images = serving.state_of(ServerImages)
    reader = images.reader
    if reader is not None and call.prompt.features:
        request_images.keep(call.prompt, images.features, call.generate.options.cache_salt or "")
        with_patches = body.mm_payload != "none" and body.return_mm_kwargs is not False
        size = 8 * sum(len(feature.data) for feature in call.prompt.features)
        rendered.features = await route.run(
            lambda: request_images.rendered_features(call.prompt, reader.kind, with_patches=with_patches), size
        )
    return route.reply(rendered, {"X-Request-Id": request_id} | route.headers)


async def render_responses(serving: Serving, request: Request) -> Response:
    """POST /v1/responses/render: the input as a token request"""
    return await rendered_chat((await responses.read_response(serving, request, replies=False)).chat)


async def render_completions(serving: Serving, request: Request) -> Response:
    """POST /v1/completions/render: the prompts as token requests, one for each"""
    call = await completions.read_completion(serving, request, replies=False)
    refuse_beams(call.beams)
    forbidden = await serving.requests.check(request, call.generate, call.ids, call.fields)
    route, body = call.route, call.route.body
    params = _portable(call.params, forbidden)
    echo = bool(body.return_token_ids or body.echo) or call.params.prompt_logprobs is not None
    request_id = _request_id(route)
    several = len(call.ids) > 1
    special = body.add_special_tokens is not False

    def rendered_prompt(index: int, ids: list[int]) -> Rendered:
        name = f"{request_id}-{index}" if several else request_id
        one = _rendered(serving, body, params, call.generate, ids, echo=echo, request_id=name)
        extras = render_extras.of_text(serving, body, call.prompts[index], ids, special)
        return msgspec.structs.replace(one, **extras._asdict())

    size = 8 * sum(map(len, call.ids)) if render_extras.asked_for(body) else 0
    rendered = await route.run(lambda: [rendered_prompt(i, ids) for i, ids in enumerate(call.ids)], size)
    return route.reply(rendered, {"X-Request-Id": request_id} | route.headers)


def _request_id(route: RouteCall[schemas.TextBody]) -> str:
    """The id of the rendered request: the client's, from the header rather than the body, or a new one."""
    client_id = given_request_id(route.request, route.body.request_id, header_wins=True)
    return client_id or f"{RENDERED}{secrets.token_hex(16)}"


def _chat_extras(call: chat.ChatCall) -> render_extras.PromptExtras:
    serving, body = call.route.serving, call.route.body
    options = chat_prompts.template_options(serving, body, body.reasoning_effort, None)
    return render_extras.of_chat(serving, body, options, call.ids)


def _portable(params: SamplingParams, forbidden: list[list[int]]) -> SamplingParams:
    """The parameters, with the forbidden words as token ids."""
    return msgspec.structs.replace(params, bad_words=[], bad_token_sequences=forbidden)


def _rendered(
    serving: Serving,
    body: schemas.TextBody,
    params: SamplingParams,
    generate: GenerateRequest,
    ids: list[int],
    *,
    echo: bool,
    request_id: str,
) -> Rendered:
    """`echo`: the reply must repeat the prompt, which `derender` needs."""
    options = None
    if body.stream_options is not None:
        options = StreamOptions(*schemas.usage_options(serving, body))
    return Rendered(
        token_ids=ids,
        sampling_params=params,
        model=body.model or serving.model.name,
        request_id=request_id,
        stream_options=options,
        return_token_ids=echo,
        **{field.name: getattr(generate.options, field.name) for field in declared.OPTIONS},
    )


async def describe(serving: Serving, request: Request) -> Response:
    """GET /tokenizer_info: the tokenizer's kind, special tokens and chat template"""
    tokenizer, ready = serving.tokenizer, serving.llm.ready
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    described = TokenizerDescription(
        tokenizer_class=tokenizer.class_name,
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.special_tokens,
        special_token_ids=sorted(tokenizer.special_ids),
        bos_token=bos,
        bos_token_id=None if bos is None else tokenizer.id_of(bos),
        eos_token=eos,
        eos_token_id=None if eos is None else tokenizer.id_of(eos),
        eos_token_ids=list(ready.eos_token_ids),
        model_max_length=ready.max_model_len,
        chat_template=serving.state_of(TextContext).template.sources,
    )
    return reply(request, described)
