"""/classify, /encode and /v1/embeddings in this dialect: vectors, and the logits of a classifier as a vector."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.dialects.openai import schemas
from tokserve.dialects.sglang import generate, replies
from tokserve.features.pooling.pooled_outputs import LabelRules, PoolingRules
from tokserve.features.pooling.routes import classify, embeddings, inputs
from tokserve.features.pooling.routes.inputs import PooledPrompts
from tokserve.server import compat
from tokserve.server.request_starter import FieldPaths
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

END = {"type": "length", "length": 0}


class SglangPoolingBody(classify.ClassifyBody):
    """The body of /classify and /encode: SGLang's `text` or `input_ids`; of /classify also vLLM's `input`."""

    others: ClassVar[compat.FieldTable] = compat.SGLANG_POOLING

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    given_id: str | list[str] | None = Field(default=None, alias="rid")
    dimensions: int | None = None


class SglangVector(msgspec.Struct):
    """What /classify and /encode make of a prompt."""

    embedding: list[float]
    details: dict[str, Any] = msgspec.field(name="meta_info")


async def classify_route(serving: Serving, request: Request) -> Response:
    """POST /classify: a classifier's logits for each text; with `input`, as vLLM has this route"""
    call = await schemas.read_body(serving, request, SglangPoolingBody)
    body = call.body
    if body.text is None and body.input_ids is None:
        if body.given_id is not None or body.dimensions is not None:
            raise RequestError("rid and dimensions come with text or input_ids", field="input_ids")
        return await classify.respond(call)
    return await _respond(call, inputs.label_rules(serving))


async def encode(serving: Serving, request: Request) -> Response:
    """POST /encode: a vector for each text, or a classifier's logits"""
    call = await schemas.read_body(serving, request, SglangPoolingBody)
    if call.body.text is None and call.body.input_ids is None:
        raise RequestError("text or input_ids is required", field="input_ids")
    return await _respond(call, inputs.any_rules(serving))


async def embed(serving: Serving, request: Request) -> Response:
    """POST /v1/embeddings: a vector for each input, or a classifier's logits"""
    call = await schemas.read_body(serving, request, embeddings.EmbeddingBody)
    rules = inputs.any_rules(serving)
    _check(rules, call.body.dimensions)
    if isinstance(rules, LabelRules) and call.body.use_activation is None:
        call.body.use_activation = False
    return await embeddings.respond(call, rules)


async def _respond(call: RouteCall[SglangPoolingBody], rules: PoolingRules) -> Response:
    """The vectors of a body with texts or ids."""
    serving, body = call.serving, call.body
    began = time.monotonic()
    if body.input is not None or body.messages is not None:
        raise invalid("input", "and messages exclude text and input_ids")
    _check(rules, body.dimensions)
    width = len(rules.labels) if isinstance(rules, LabelRules) else serving.llm.ready.facts["hidden_size"]
    if not isinstance(rules, LabelRules):
        rules.check_dimensions(body.dimensions, width)
        width = body.dimensions or width
    prompts, field, listed = await call.run(lambda: generate.prompts_of(serving, body))
    inputs.check_reply(serving, len(prompts) * width * inputs.BYTES_OF_VALUE, field, "fewer prompts")
    body.request_id = generate.request_id(body.given_id, len(prompts)) or body.request_id
    fields = FieldPaths(f"{field}[0]" if listed and len(prompts) == 1 else field)
    pooled = await inputs.pool(call, rules.params, prompts, fields)
    elapsed = time.monotonic() - began

    def reply() -> Response:
        vectors = [
            SglangVector(_values(rules, body, vector).tolist(), _details(pooled, len(prompt), elapsed))
            for prompt, vector in zip(prompts, pooled.vectors, strict=True)
        ]
        return replies.json(vectors if listed else vectors[0], pooled.headers)

    return await call.run(reply, inputs.REPLY_BYTES)


def _values(rules: PoolingRules, body: SglangPoolingBody, vector: bytes) -> NDArray[np.float32]:
    """What the rules make of a prompt's vector."""
    if isinstance(rules, LabelRules):
        return rules.finish(vector, bool(body.use_activation))
    return rules.finish(vector, body.dimensions, body.use_activation)


def _details(pooled: PooledPrompts, prompt_tokens: int, elapsed: float) -> dict[str, Any]:
    """`meta_info` of a prompt."""
    return {
        "id": pooled.headers["X-Request-Id"],
        "finish_reason": END,
        "prompt_tokens": prompt_tokens,
        "weight_version": pooled.version,
        "e2e_latency": elapsed,
    }


def _check(rules: PoolingRules, dimensions: int | None) -> None:
    """Raise RequestError for what such a model does not make here."""
    if rules.tokens:
        raise RequestError("this model labels tokens: use /pooling", field="model", code=inputs.UNSUPPORTED)
    if dimensions is not None and isinstance(rules, LabelRules):
        raise RequestError("dimensions is for embeddings", field="dimensions", code=inputs.UNSUPPORTED)
