"""Texts as ids and ids as texts, one or a list of them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import invalid
from tokserve.dialects.openai import schemas, tokenize
from tokserve.dialects.openai.completions import MAX_PROMPTS
from tokserve.dialects.sglang.replies import json
from tokserve.server.serving import Serving


class SglangTokenizeBody(schemas.TokenizeBody):
    """The body of /tokenize, with a list of texts as well."""

    prompt: str | list[str] | None = None  # type: ignore[assignment]  # wider than the base's


class SglangDetokenizeBody(schemas.DetokenizeBody):
    """The body of /detokenize, with a list of lists as well; special tokens are left out unless it says otherwise."""

    tokens: list[int | list[int]]  # type: ignore[assignment]  # likewise


class TokenizedTexts(msgspec.Struct):
    """The reply of /tokenize to a list of texts."""

    tokens: list[list[int]]
    count: list[int]
    max_model_len: int


class SglangText(msgspec.Struct):
    """The reply of /detokenize; `prompt`: the same under this server's own name."""

    text: str | list[str]
    prompt: str | list[str]


async def tokenize_texts(serving: Serving, request: Request) -> Response:
    """POST /tokenize: the ids of a text, of several or of a chat"""
    call = await schemas.read_body(serving, request, SglangTokenizeBody)
    body = call.body
    texts = body.prompt
    if not isinstance(texts, list):
        return await tokenize.respond(call)
    if body.messages is not None or body.return_token_strs:
        field = "messages" if body.messages is not None else "return_token_strs"
        raise invalid(field, "is for one prompt, not for a list")
    _check_count(texts, "prompt")

    def work() -> Response:
        for index, text in enumerate(texts):
            serving.check_text(text, f"prompt[{index}]", tokenize.MIN_BYTES)
        ids = serving.tokenizer.encode_each(texts, body.add_special_tokens is not False)
        reply = TokenizedTexts(ids, list(map(len, ids)), serving.llm.ready.max_model_len)
        return json(reply, call.headers)

    return await call.run(work)


async def detokenize(serving: Serving, request: Request) -> Response:
    """POST /detokenize: the text of ids, or the texts of lists of ids"""
    call = await schemas.read_body(serving, request, SglangDetokenizeBody)
    skip = call.body.skip_special_tokens is not False
    tokens: list[Any] = call.body.tokens

    def decoded(ids: list[int], field: str) -> str:
        serving.check_ids(ids, field)
        return serving.tokenizer.decode(ids, skip)

    def work() -> Response:
        text: str | list[str]
        listed = [isinstance(one, list) for one in tokens]
        if listed and listed.count(listed[0]) != len(listed):
            where = f"tokens[{listed.index(not listed[0])}]"
            raise invalid(
                where, "must be a list of ids, as those before it" if listed[0] else "must be an id, as those before it"
            )
        if listed and listed[0]:
            _check_count(tokens, "tokens")
            text = [decoded(ids, f"tokens[{index}]") for index, ids in enumerate(tokens)]
        else:
            text = decoded(tokens, "tokens")
        return json(SglangText(text, text), call.headers)

    return await call.run(work)


def _check_count(values: list[Any], field: str) -> None:
    if len(values) > MAX_PROMPTS:
        raise invalid(field, f"must have at most {MAX_PROMPTS} entries, got {len(values)}")
