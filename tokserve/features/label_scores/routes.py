"""vLLM's route for the scores of labels."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.dialects.openai import schemas
from tokserve.features.label_scores import labels
from tokserve.features.label_scores.labels import LabelScoresBody
from tokserve.server.endpoint import Endpoint
from tokserve.server.generation import Usage
from tokserve.server.serving import Serving


class LabelScore(msgspec.Struct):
    """The probability of the first label after an item."""

    index: int
    score: float
    object: str = "score"


class LabelScoresReply(msgspec.Struct):
    """The reply of /generative_scoring."""

    id: str
    created: int
    model: str
    data: list[LabelScore]
    usage: Usage
    object: str = "list"


async def generative_scoring(serving: Serving, request: Request) -> Response:
    """POST /generative_scoring: the probability of the first of some tokens after a query and each item"""
    call = await schemas.read_body(serving, request, LabelScoresBody)
    call.body.apply_softmax = call.body.apply_softmax is not False
    scored = await labels.score_labels(call, joins_texts=False)
    data = [LabelScore(index, value) for index, value in enumerate(scored.probabilities[:, 0].tolist())]
    name = serving.model.answers_as(call.body.model)
    reply = LabelScoresReply(f"generative-scoring-{scored.key}", int(time.time()), name, data, scored.usage)
    return call.reply(reply, scored.headers)


ENDPOINTS = (
    Endpoint(
        ("POST",),
        "/generative_scoring",
        generative_scoring,
        LabelScoresBody,
        reply=LabelScoresReply,
        runner="generate",
    ),
)
