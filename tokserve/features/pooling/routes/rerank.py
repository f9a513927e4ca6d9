"""POST /rerank: documents ranked by relevance to a query, as Cohere and Jina have it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.dialects.openai import schemas
from tokserve.features.pooling.routes import pairs
from tokserve.features.pooling.routes.inputs import PoolingUsage, is_listed
from tokserve.features.pooling.routes.pairs import Sides
from tokserve.server.serving import Serving

PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


class RerankBody(pairs.PairsBody):
    """The body of /rerank.  `top_n`: so many results, 0: all."""

    query: Any = None
    documents: Any = None
    top_n: int | None = None
    return_documents: bool | None = None


class RankedDocument(msgspec.Struct):
    """A document's text; ids, if it was given as ids."""

    text: str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class RankedItem(msgspec.Struct):
    """A document, by its place in the request, and how well it fits."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankReply(msgspec.Struct):
    """The reply of /rerank; the best document is the first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedItem]


async def rerank(serving: Serving, request: Request) -> Response:
    """POST /rerank: documents ranked by relevance to a query"""
    call = await schemas.read_body(serving, request, RerankBody)
    body = call.body
    if body.top_n is not None and body.top_n < 0:
        raise invalid("top_n", f"must be at least 0, got {body.top_n}")
    sides = await call.run(lambda: _sides(body))
    scored = await pairs.score(call, sides)
    order = sorted(range(len(scored.scores)), key=lambda index: (-scored.scores[index], index))
    results = [
        RankedItem(index, scored.scores[index], UNSET if body.return_documents is False else _document(sides, index))
        for index in order[: body.top_n or None]
    ]
    pooled = scored.pooled
    reply = RerankReply(f"rerank-{pooled.key}", serving.model.answers_as(body.model), pooled.usage, results)
    return await call.run(lambda: call.reply(reply, pooled.headers))


def _sides(body: RerankBody) -> Sides:
    query = pairs.entries(body.query, "query")
    if is_listed(body.query):
        raise RequestError("query must be one text", field="query")
    if body.documents and not is_listed(body.documents):
        raise RequestError("documents must be a list of texts", field="documents")
    return Sides(query, pairs.entries(body.documents, "documents"), ("query", "documents"), (False, True))


def _document(sides: Sides, index: int) -> RankedDocument:
    side = sides.second[index]
    return RankedDocument(text=side) if isinstance(side, str) else RankedDocument(token_ids=list(side))
