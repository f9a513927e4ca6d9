"""SGLang's /v1/score: the probabilities of labels after a query and each item."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.dialects.openai import schemas
from tokserve.dialects.sglang import replies
from tokserve.features.label_scores import labels
from tokserve.features.label_scores.labels import LabelScoresBody
from tokserve.server.generation import Usage
from tokserve.server.serving import Serving


class SglangScoresReply(msgspec.Struct):
    """The reply of /v1/score: of each item, the probability of each label."""

    scores: list[list[float]]
    model: str
    usage: Usage
    object: str = "scoring"


async def score_labels(serving: Serving, request: Request) -> Response:
    """POST /v1/score: the probabilities of some tokens after a query and each item"""
    call = await schemas.read_body(serving, request, LabelScoresBody)
    scored = await labels.score_labels(call, joins_texts=True)
    reply = SglangScoresReply(scored.probabilities.tolist(), serving.model.answers_as(call.body.model), scored.usage)
    return replies.json(reply, scored.headers)
