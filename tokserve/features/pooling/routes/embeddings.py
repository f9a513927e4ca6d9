"""Vectors as JSON, base64 or bytes, and /v1/embeddings and /pooling, which return them, or one for each token.

A vector does not depend on the others of its request, on chunks or on the prefix cache: bit for bit.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError
from tokserve.dialects.openai import schemas
from tokserve.features.pooling.pooled_outputs import LabelRules, PoolingRules, VectorRules, rules_for
from tokserve.features.pooling.routes import inputs
from tokserve.features.pooling.routes.inputs import PooledPrompts, PoolingUsage
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

Encoding = Literal["float", "base64", "bytes", "bytes_only"]
BYTES_PACKED = 6  # in base64


class EmbeddingBody(inputs.InputBody):
    """The body of /v1/embeddings."""

    dimensions: int | None = None
    encoding_format: Encoding | None = None


class VectorsBody(EmbeddingBody):
    """The body of /pooling.  `task`: embed or classify, as the model does, or the same for each token; default: what
    the model does."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class EmbeddingItem(msgspec.Struct):
    """A vector, as numbers or as base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingReply(msgspec.Struct):
    """The reply of /v1/embeddings."""

    id: str
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PoolingUsage
    object: str = "list"


class VectorItem(msgspec.Struct):
    """A vector, or one for each token, as numbers or as base64 of little-endian float32."""

    index: int
    data: list[Any] | str  # numbers, or lists of numbers
    object: str = "pooling"


class VectorsReply(msgspec.Struct):
    """The reply of /pooling."""

    id: str
    created: int
    model: str
    data: list[VectorItem]
    usage: PoolingUsage
    object: str = "list"


async def embeddings(serving: Serving, request: Request) -> Response:
    """POST /v1/embeddings: a vector for each input"""
    call = await schemas.read_body(serving, request, EmbeddingBody)
    return await respond(call, inputs.vector_rules(serving))


async def vectors(serving: Serving, request: Request) -> Response:
    """POST /pooling: embeddings or label probabilities, for each input or for each token"""
    call = await schemas.read_body(serving, request, VectorsBody)
    return await respond(call, rules_for(inputs.any_rules(serving), call.body.task))


async def respond(call: RouteCall[EmbeddingBody], rules: PoolingRules) -> Response:
    """What the rules make of each input."""
    serving, body = call.serving, call.body
    if isinstance(rules, VectorRules):
        rules.check_dimensions(body.dimensions, serving.llm.ready.facts["hidden_size"])
    elif body.dimensions is not None:
        raise RequestError("dimensions is for embeddings", field="dimensions", code=inputs.UNSUPPORTED)
    serving.requests.name_request(call.request, body)
    prompts = await call.run(lambda: inputs.prompts_of(serving, body))
    width = inputs.BYTES_OF_VALUE if body.encoding_format in (None, "float") else BYTES_PACKED
    values = body.dimensions or serving.llm.ready.facts["hidden_size"]
    if isinstance(rules, LabelRules):
        values = len(rules.labels)
    count = sum(map(len, prompts)) if rules.tokens else len(prompts)
    inputs.check_reply(serving, count * values * width, "input", "fewer inputs, or ask for base64")
    pooled = await inputs.pool(call, rules.params, prompts, inputs.fields_of(body))
    return await call.run(lambda: _reply(call, rules, pooled), inputs.REPLY_BYTES)


def _reply(call: RouteCall[EmbeddingBody], rules: PoolingRules, pooled: PooledPrompts) -> Response:
    serving, body = call.serving, call.body
    rows: list[NDArray[np.float32]]
    if isinstance(rules, VectorRules):
        hidden = serving.llm.ready.facts["hidden_size"]
        rows = [rules.finish(vector, body.dimensions, body.use_activation, hidden) for vector in pooled.vectors]
    else:
        rows = [rules.finish(vector, body.use_activation) for vector in pooled.vectors]
    is_pooling = isinstance(body, VectorsBody)
    prefix = "pool" if is_pooling else "embd"
    about = f"{prefix}-{pooled.key}", int(time.time()), serving.model.answers_as(body.model)
    if body.encoding_format in ("bytes", "bytes_only"):
        return _packed(rows, about, pooled, body.encoding_format)
    encoded = [inputs.encoded(row, body.encoding_format or "float") for row in rows]
    reply: EmbeddingReply | VectorsReply
    if is_pooling:
        reply = VectorsReply(*about, [VectorItem(i, one) for i, one in enumerate(encoded)], pooled.usage)
    else:
        reply = EmbeddingReply(*about, [EmbeddingItem(i, one) for i, one in enumerate(encoded)], pooled.usage)
    return call.reply(reply, pooled.headers)


def _packed(
    rows: list[NDArray[np.float32]], about: tuple[str, int, str], pooled: PooledPrompts, encoding: str
) -> Response:
    """All vectors as little-endian float32; the header `metadata` has the rest of the reply."""
    headers = pooled.headers
    if encoding == "bytes":
        (name, created, model_name), ends = about, np.cumsum([row.nbytes for row in rows]).tolist()
        places = [
            {
                "index": i,
                "embed_dtype": "float32",
                "endianness": "little",
                "start": end - row.nbytes,
                "end": end,
                "shape": list(row.shape),
            }
            for i, (row, end) in enumerate(zip(rows, ends, strict=True))
        ]
        rest = {"id": name, "created": created, "model": model_name, "data": places, "usage": pooled.usage}
        headers = headers | {"metadata": msgspec.json.encode(rest).decode()}
    content = b"".join(row.astype("<f4").tobytes() for row in rows)
    return Response(content, headers=headers, media_type="application/octet-stream")
