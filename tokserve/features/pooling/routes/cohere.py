"""POST /v2/embed: embeddings as Cohere's API has them, by type.

Source: docs.cohere.com/reference/embed; vLLM serves the same fields.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.dialects.openai import schemas
from tokserve.dialects.openai.completions import tokenized
from tokserve.features.chat.prompts import Side, cut
from tokserve.features.pooling.routes import inputs
from tokserve.server.request_starter import FieldPaths
from tokserve.server.serving import Serving

Type = Literal["float", "binary", "ubinary", "base64"]
MAX_TEXTS = 4096
INPUT_TYPES = ("search_document", "search_query", "classification", "clustering", "image")


class CohereBody(inputs.PoolingBody):
    """The body of /v2/embed: one of `texts` and `inputs`.  `truncate`: what to cut of a text that is too long."""

    texts: list[str] | None = None
    inputs: list[Any] | None = None
    images: list[Any] | None = None
    input_type: str | None = None
    output_dimension: int | None = None
    embedding_types: list[Type] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = None


class BilledUnits(msgspec.Struct):
    """Tokens read."""

    input_tokens: int


class ApiVersion(msgspec.Struct):
    """The version of Cohere's API."""

    version: str = "2"


class Meta(msgspec.Struct):
    """What a reply says about itself."""

    billed_units: BilledUnits
    api_version: ApiVersion = msgspec.field(default_factory=ApiVersion)


class CohereReply(msgspec.Struct):
    """The reply of /v2/embed: by type, a vector for each text."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: Meta
    response_type: str = "embeddings_by_type"


async def embed(serving: Serving, request: Request) -> Response:
    """POST /v2/embed: embeddings by type, as in Cohere's API"""
    call = await schemas.read_body(serving, request, CohereBody)
    body = call.body
    rules = inputs.vector_rules(serving)
    hidden = serving.llm.ready.facts["hidden_size"]
    try:
        rules.check_dimensions(body.output_dimension, hidden)
    except RequestError as error:
        raise FieldPaths("texts", others={"dimensions": "output_dimension"}).rename(error) from None
    types = list(dict.fromkeys(body.embedding_types or ["float"]))
    width = body.output_dimension or hidden
    if width % 8 and not {"binary", "ubinary"}.isdisjoint(types):
        raise invalid("embedding_types", f"binary needs a dimension that is a multiple of 8, and it is {width}")
    texts = _texts(body)
    inputs.check_reply(serving, len(texts) * width * inputs.BYTES_OF_VALUE * len(types), "texts", "fewer texts")
    serving.requests.name_request(request, body)
    prompts = await call.run(lambda: _prompts(serving, body, texts))
    if body.input_type is not None:
        if body.input_type not in INPUT_TYPES:
            raise invalid("input_type", f"must be one of {', '.join(INPUT_TYPES)}")
        call.ignored.append("input_type")
    paths = FieldPaths("texts[0]" if len(texts) == 1 else "texts")
    pooled = await inputs.pool(call, rules.params, prompts, paths)

    def reply() -> Response:
        rows = [rules.finish(vector, body.output_dimension, body.use_activation) for vector in pooled.vectors]
        by_type: dict[str, list[Any]] = {kind: [_encoded(row, kind) for row in rows] for kind in types}
        units = Meta(BilledUnits(pooled.usage.prompt_tokens))
        return call.reply(CohereReply(f"embd-{pooled.key}", by_type, texts, units), pooled.headers)

    return await call.run(reply, inputs.REPLY_BYTES)


def _texts(body: CohereBody) -> list[str]:
    """The texts of either field.  Raises RequestError."""
    if body.images:
        raise invalid("images", "are not supported: texts are embedded here", code=inputs.UNSUPPORTED)
    if (body.texts is None) == (body.inputs is None):
        raise invalid("texts", "or inputs must be given, and not both")
    name, entries = ("texts", body.texts) if body.texts is not None else ("inputs", body.inputs)
    if not entries or len(entries) > MAX_TEXTS:
        raise invalid(name, f"must have 1 to {MAX_TEXTS} entries, got {len(entries or ())}")
    return body.texts if body.texts is not None else [_text(i, entry) for i, entry in enumerate(entries)]


def _text(index: int, entry: Any) -> str:
    """The text of an entry of `inputs`: {"content": [{"type": "text", "text": ...}, ...]}."""
    field = f"inputs[{index}].content"
    parts = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(parts, list) or not parts:
        raise invalid(field, "must be a list of parts")
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{field}[{number}]", "must be {'type': 'text', 'text': ...}", code=inputs.UNSUPPORTED)
        texts.append(part["text"])
    return "".join(texts)


def _prompts(serving: Serving, body: CohereBody, texts: list[str]) -> list[list[int]]:
    name = "texts" if body.texts is not None else "inputs"
    context = serving.llm.ready.max_model_len
    if body.max_tokens is not None and body.max_tokens < 1:
        raise invalid("max_tokens", f"must be at least 1, got {body.max_tokens}")
    limit = min(context, body.max_tokens or context)
    prompts = []
    min_bytes = 0 if body.truncate == "NONE" else inputs.CUT_BYTES
    for index, ids in enumerate(tokenized(serving, list(texts), True, True, name, min_bytes)):
        if len(ids) > limit and body.truncate == "NONE":
            field = f"{name}[{index}]"
            raise RequestError(
                f"{field} has {len(ids)} tokens, and at most {limit} are embedded (truncate is NONE)",
                field=field,
                code="context_length_exceeded",
            )
        side: Side = "left" if body.truncate == "START" else "right"
        prompts.append(cut(ids, limit, side, serving.tokenizer.frame)[0])
    return prompts


def _encoded(vector: NDArray[np.float32], kind: str) -> Any:
    """A vector as numbers; its signs, eight to a byte (`binary`: signed); or base64 of little-endian float32."""
    if kind in ("float", "base64"):
        return inputs.encoded(vector, kind)
    packed = np.packbits(vector > 0).astype(np.int16)
    return (packed - 128 if kind == "binary" else packed).tolist()
