"""POST /score: a relevance score for each pair of texts, 1:1, 1:N or N:N."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError
from tokserve.dialects.openai import schemas
from tokserve.features.pooling.routes import pairs
from tokserve.features.pooling.routes.inputs import PoolingUsage
from tokserve.features.pooling.routes.pairs import Sides
from tokserve.server.serving import Serving

PATHS = ("/score", "/v1/score")
NAMES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class ScoreBody(pairs.PairsBody):
    """The body of /score: one pair of the fields in `NAMES`."""

    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    text_1: Any = None
    text_2: Any = None


class ScoreItem(msgspec.Struct):
    """The score of a pair."""

    index: int
    score: float
    object: str = "score"


class ScoreReply(msgspec.Struct):
    """The reply of /score."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: PoolingUsage
    object: str = "list"


async def score(serving: Serving, request: Request) -> Response:
    """POST /score: a relevance score for each pair of texts"""
    call = await schemas.read_body(serving, request, ScoreBody)
    sides = await call.run(lambda: _sides(call.body))
    scored = await pairs.score(call, sides)
    items = [ScoreItem(index, value) for index, value in enumerate(scored.scores)]
    pooled = scored.pooled
    name = serving.model.answers_as(call.body.model)
    reply = ScoreReply(f"score-{pooled.key}", int(time.time()), name, items, pooled.usage)
    return call.reply(reply, pooled.headers)


def _sides(body: ScoreBody) -> Sides:
    present = [name for name in dict.fromkeys(sum(NAMES, ())) if getattr(body, name) is not None]
    fields = next((names for names in NAMES if set(names) == set(present)), None)
    if fields is None:
        expected = next((names for names in NAMES if present and present[0] in names), NAMES[0])
        field = next((name for name in expected if name not in present), present[-1] if present else expected[0])
        raise RequestError(
            "give queries and documents (or items), or text_1 and text_2, or data_1 and data_2", field=field
        )
    first, second = (getattr(body, name) for name in fields)
    listed = isinstance(first, list), isinstance(second, list)
    return Sides(pairs.entries(first, fields[0]), pairs.entries(second, fields[1]), fields, listed)
