"""/invocations: one route for all bodies.  The fields that a body has say which of the other routes answers it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from tokserve.base.errors import RequestError, invalid
from tokserve.dialects.openai import chat, completions, schemas
from tokserve.features.pooling.pooled_outputs import VectorRules
from tokserve.features.pooling.routes import classify, embeddings, rerank, score
from tokserve.features.pooling.server_pooling import ServerPooling
from tokserve.server.endpoint import Handler
from tokserve.server.http.body import encode_json, encode_msgpack, is_msgpack
from tokserve.server.serving import Serving

ADAPTER = "x-amzn-sagemaker-adapter-identifier"  # the header that names an adapter of an inference component
GENERATING: dict[str, Handler] = {"messages": chat.chat, "prompt": completions.completions}
PAIRS: dict[str, Handler] = {
    "query": rerank.rerank,
    "queries": score.score,
    "text_1": score.score,
    "data_1": score.score,
}


class InvocationBody(schemas.RequestBody):
    """The body of /invocations: that of /v1/chat/completions (`messages`) or /v1/completions (`prompt`); on a server
    that pools, that of /v1/embeddings or /classify (`input`, `messages`), /rerank (`query`) or /score."""

    messages: list[Any] | None = None
    prompt: Any = None
    input: Any = None
    query: Any = None
    stream: bool | None = None


async def invocations(serving: Serving, request: Request) -> Response:
    """POST /invocations: the reply of the route whose body this is"""
    is_packed = is_msgpack(request)
    raw = bytes(await serving.bodies.read(request))
    value = await serving.bodies.decode(request, raw)
    if not isinstance(value, dict):
        raise RequestError("the body must be an object")
    handler = _handler(serving, value)
    if adapter := request.headers.get(ADAPTER):
        if value.get("model") not in (None, adapter):
            raise invalid("model", f"differs from the header {ADAPTER}; send one of them")
        raw = (encode_msgpack if is_packed else encode_json)(value | {"model": adapter})
    return await handler(serving, Request(request.scope, _replayed(raw, request.receive)))


def _handler(serving: Serving, value: dict[Any, Any]) -> Handler:
    rules = serving.state_of(ServerPooling).rules
    if rules is None:
        routes = GENERATING
    else:
        inputs = embeddings.embeddings if isinstance(rules, VectorRules) else classify.classify
        routes = PAIRS | {"input": inputs, "messages": inputs}
    handler = next((handler for name, handler in routes.items() if value.get(name) is not None), None)
    if handler is None:
        raise RequestError(f"the body must have one of {', '.join(routes)}")
    return handler


def _replayed(raw: bytes, receive: Receive) -> Receive:
    """What a body that has been read came from, once more; then what follows it."""
    pending = [raw]

    async def receive_again() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return receive_again
