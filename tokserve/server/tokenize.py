"""Text to ids and back, without generating: /tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.errors import RequestError
from tokserve.server import body, schemas
from tokserve.server.chat import rendered
from tokserve.server.schemas import DetokenizeBody, TokenizeBody
from tokserve.server.serving import Serving
from tokserve.server.workers import off_loop

LEAST = 1 << 20  # bytes that may be tokenized whatever the context is: to cut a document, or to count


class Tokens(msgspec.Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


async def tokenize(serving: Serving, request: Request) -> Response:
    """POST /tokenize"""
    asked, ignored, size = await schemas.read(serving, request, TokenizeBody)
    answer = await off_loop(request, size, lambda: _tokens(serving, asked))
    return body.reply(request, answer, schemas.ignored_header(ignored))


def _tokens(serving: Serving, asked: TokenizeBody) -> Tokens:
    ids = _ids(serving, asked)
    strings = [serving.tokenizer.spelling(token) or "" for token in ids] if asked.return_token_strs else None
    return Tokens(len(ids), serving.llm.ready.max_model_len, ids, strings)


def _ids(serving: Serving, asked: TokenizeBody) -> list[int]:
    if asked.messages is not None:
        if asked.prompt is not None:
            raise RequestError("give prompt or messages, not both", field="prompt")
        return rendered(serving, asked)
    if asked.prompt is None:
        raise RequestError("prompt (or messages) is required", field="prompt")
    serving.check_text(asked.prompt, "prompt", LEAST)
    return serving.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)


async def detokenize(serving: Serving, request: Request) -> Response:
    """POST /detokenize"""
    asked, ignored, size = await schemas.read(serving, request, DetokenizeBody)
    serving.check_ids(asked.tokens, "tokens")
    skip = bool(asked.skip_special_tokens)
    text = await off_loop(request, size, lambda: serving.tokenizer.decode(asked.tokens, skip))
    return body.reply(request, Text(text), schemas.ignored_header(ignored))
