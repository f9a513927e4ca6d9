"""POST /v1/embeddings: a vector for each input, as OpenAI has it, of a model that is served with --runner pooling.

A vector does not depend on the others of its request, on chunks or on the prefix cache: bit for bit.
"""

from __future__ import annotations

import base64
import time
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from tokserve.client.outputs import ChoiceOutput
from tokserve.client.pooling import VectorRules
from tokserve.errors import RequestError, invalid
from tokserve.server.generation import Generation
from tokserve.server.http import body as bodies
from tokserve.server.http.declared import OPTIONS, model
from tokserve.server.http.workers import off_loop
from tokserve.server.openai import schemas
from tokserve.server.openai.completions import parse_prompts, tokenized
from tokserve.server.replies import sse
from tokserve.server.serving import FieldPaths, Serving

Encoding = Literal["float", "base64", "bytes", "bytes_only"]
USED = ("priority", "cache_salt", "group_id", "deadline_ms", "queue_timeout_ms")
BYTES_OF_VALUE = 24  # of a float in JSON, at most
BYTES_PACKED = 6  # in base64

_OptionFields: Any = model("_OptionFields", schemas.RequestBody, (field for field in OPTIONS if field.name in USED))


class EmbeddingBody(_OptionFields):  # type: ignore[misc]
    """The body of /v1/embeddings."""

    input: Any = None
    messages: list[Any] | None = None
    dimensions: int | None = None
    encoding_format: Encoding | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = None


class EmbeddingUsage(msgspec.Struct):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct):
    """A vector, as numbers or as base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingReply(msgspec.Struct):
    """The answer of /v1/embeddings."""

    id: str
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage
    object: str = "list"


class _Call(NamedTuple):
    body: EmbeddingBody
    ignored: list[str]
    prompts: list[list[int]]
    pooler: VectorRules


async def create(serving: Serving, request: Request) -> Response:
    """POST /v1/embeddings: a vector for each input"""
    call = await _read(serving, request)
    _check_size(serving, call)
    generate = serving.request_of(request, call.body, call.pooler.params, text=False)
    fields = FieldPaths("input")
    generation = await serving.start(request, generate, call.prompts, fields)
    headers = {"X-Request-Id": generate.request_id, **schemas.ignored_header(call.ignored)}
    try:
        choices = sorted(await sse.collect(generation, request), key=lambda choice: choice.index)
        return await off_loop(request, 1 << 20, lambda: _reply(serving, request, call, generation, choices, headers))
    finally:
        await generation.close()


async def _read(serving: Serving, request: Request) -> _Call:
    body, ignored, size = await schemas.read(serving, request, EmbeddingBody)
    pooler = serving.pooler
    if pooler is None:
        raise RequestError(
            "the model generates here; it makes embeddings with --runner pooling", field="model", code="unsupported"
        )
    pooler.check_dimensions(body.dimensions, serving.llm.ready.facts["hidden_size"])
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens < -1:
        raise invalid("truncate_prompt_tokens", f"must be at least -1, got {body.truncate_prompt_tokens}")
    prompts = await off_loop(request, size, lambda: _prompts(serving, body))
    return _Call(body, ignored, prompts, pooler)


def _check_size(serving: Serving, call: _Call) -> None:
    width = BYTES_OF_VALUE if call.body.encoding_format in (None, "float") else BYTES_PACKED
    size = len(call.prompts) * (call.body.dimensions or serving.llm.ready.facts["hidden_size"]) * width
    limit = serving.config.limits.max_reply_bytes
    if size > limit:
        raise RequestError(
            f"the reply may have {size >> 20} MiB, and at most {limit >> 20} are served (--max-reply-bytes): send "
            "fewer inputs, or ask for base64", field="input", code="reply_too_large",
        )  # fmt: skip


def _prompts(serving: Serving, body: EmbeddingBody) -> list[list[int]]:
    if (body.input is None) == (body.messages is None):
        raise RequestError("give input or messages", field="input")
    if body.messages is not None:
        serving.check_messages(body.messages, "messages")
        prompts = [serving.template.render(body.messages, add_generation_prompt=False)]
    else:
        parsed = parse_prompts(body.input, "input")
        listed = isinstance(body.input, list) and not isinstance(body.input[0], int)
        prompts = tokenized(serving, parsed, body.add_special_tokens is not False, listed, "input")
    return [_truncated(ids, body, serving.llm.ready.max_model_len) for ids in prompts]


def _truncated(ids: list[int], body: EmbeddingBody, context: int) -> list[int]:
    limit = body.truncate_prompt_tokens
    if limit is None:
        return ids
    limit = context if limit == -1 else min(limit, context)
    return ids[:limit] if body.truncation_side == "right" else ids[len(ids) - min(limit, len(ids)) :]


def _reply(
    serving: Serving, request: Request, call: _Call, generation: Generation, choices: list[ChoiceOutput],
    headers: dict[str, str],
) -> Response:  # fmt: skip
    body, pooler = call.body, call.pooler
    for choice in choices:
        if not choice.pooled:
            raise RequestError(f"the request ended without a vector ({choice.stop_detail})", code=choice.stop_detail)
    vectors = [pooler.finish(choice.pooled, body.dimensions, body.use_activation) for choice in choices]
    usage = generation.usage()
    counted = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
    name, created = serving.answers_as(body.model), int(time.time())
    if body.encoding_format in ("bytes", "bytes_only"):
        return _packed(vectors, f"embd-{generation.key}", created, name, counted, headers, body.encoding_format)
    encoded = [_encoded(vector, body.encoding_format or "float") for vector in vectors]
    reply = EmbeddingReply(
        f"embd-{generation.key}", created, name, [EmbeddingItem(i, one) for i, one in enumerate(encoded)], counted
    )
    return bodies.reply(request, reply, headers)


def _encoded(vector: NDArray[np.float32], encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values


def _packed(
    vectors: list[NDArray[np.float32]], name: str, created: int, model_name: str, usage: EmbeddingUsage,
    headers: dict[str, str], encoding: str,
) -> Response:  # fmt: skip
    """All vectors as little-endian float32; the header `metadata` has the rest of the reply."""
    if encoding == "bytes":
        width = 4 * len(vectors[0])
        rows = [
            {"index": i, "embed_dtype": "float32", "endianness": "little", "start": i * width,
             "end": (i + 1) * width, "shape": [len(vector)]}
            for i, vector in enumerate(vectors)
        ]  # fmt: skip
        about = {"id": name, "created": created, "model": model_name, "data": rows, "usage": usage}
        headers = headers | {"metadata": msgspec.json.encode(about).decode()}
    content = b"".join(vector.astype("<f4").tobytes() for vector in vectors)
    return Response(content, headers=headers, media_type="application/octet-stream")
