"""/tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.dialects.openai import schemas
from tokserve.dialects.openai.chat_prompts import prompt_of
from tokserve.dialects.openai.schemas import DetokenizeBody, TokenizeBody
from tokserve.protocol.prompt import unpack_ids
from tokserve.server.http import body
from tokserve.server.http.workers import off_loop
from tokserve.server.serving import Serving

MIN_BYTES = 1 << 20  # so many bytes may be tokenized even if they exceed the context: to split or count a document


class TokenizeReply(msgspec.Struct):
    """The reply of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct):
    """The reply of /detokenize."""

    prompt: str


async def tokenize(serving: Serving, request: Request) -> Response:
    """POST /tokenize: the ids of a text or of a chat"""
    return await respond(serving, request, *await schemas.read_body(serving, request, TokenizeBody))


async def respond(
    serving: Serving, request: Request, request_body: TokenizeBody, ignored: list[str], size: int
) -> Response:
    """The ids that the body, which has `size` bytes, asks for."""
    given = None
    if request_body.messages is not None:
        if request_body.prompt is not None:
            raise RequestError("give prompt or messages, not both", field="prompt")
        given = unpack_ids((await prompt_of(serving, request, request_body, size)).ids)

    def work() -> Response:
        ids = _encoded(serving, request_body) if given is None else given
        strings = [serving.tokenizer.spelling(token) or "" for token in ids] if request_body.return_token_strs else None
        reply = TokenizeReply(len(ids), serving.llm.ready.max_model_len, ids, strings)
        return body.reply(request, reply, schemas.ignored_header(ignored))

    return await off_loop(request, size, work)


def _encoded(serving: Serving, request_body: TokenizeBody) -> list[int]:
    if request_body.prompt is None:
        raise invalid("prompt", "(or messages) is required")
    serving.check_text(request_body.prompt, "prompt", MIN_BYTES)
    return serving.tokenizer.encode(
        request_body.prompt, add_special_tokens=request_body.add_special_tokens is not False
    )


async def detokenize(serving: Serving, request: Request) -> Response:
    """POST /detokenize: the text of ids"""
    request_body, ignored, size = await schemas.read_body(serving, request, DetokenizeBody)
    skip = bool(request_body.skip_special_tokens)

    def work() -> Response:
        serving.check_ids(request_body.tokens, "tokens")
        reply = DetokenizeReply(serving.tokenizer.decode(request_body.tokens, skip))
        return body.reply(request, reply, schemas.ignored_header(ignored))

    return await off_loop(request, size, work)
