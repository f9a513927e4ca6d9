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
from tokserve.server.route_call import RouteCall
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
    return await respond(await schemas.read_body(serving, request, TokenizeBody))


async def respond(call: RouteCall[TokenizeBody]) -> Response:
    """The ids that the body asks for."""
    serving, body = call.serving, call.body
    given = None
    if body.messages is not None:
        if body.prompt is not None:
            raise RequestError("give prompt or messages, not both", field="prompt")
        given = unpack_ids((await prompt_of(call)).ids)

    def work() -> Response:
        ids = _encoded(serving, body) if given is None else given
        strings = [serving.tokenizer.spelling(token) or "" for token in ids] if body.return_token_strs else None
        return call.reply(TokenizeReply(len(ids), serving.llm.ready.max_model_len, ids, strings))

    return await call.run(work)


def _encoded(serving: Serving, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        raise invalid("prompt", "(or messages) is required")
    serving.check_text(body.prompt, "prompt", MIN_BYTES)
    return serving.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)


async def detokenize(serving: Serving, request: Request) -> Response:
    """POST /detokenize: the text of ids"""
    call = await schemas.read_body(serving, request, DetokenizeBody)

    def work() -> Response:
        serving.check_ids(call.body.tokens, "tokens")
        return call.reply(
            DetokenizeReply(serving.tokenizer.decode(call.body.tokens, bool(call.body.skip_special_tokens)))
        )

    return await call.run(work)
