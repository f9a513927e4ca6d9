"""POST /classify: probabilities of a classifier's labels, or its logits, as reward models are asked for."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError
from tokserve.dialects.openai import schemas
from tokserve.features.pooling.pooled_outputs import LabelRules
from tokserve.features.pooling.routes import inputs
from tokserve.features.pooling.routes.inputs import PooledPrompts, PoolingUsage
from tokserve.server.http import body as bodies
from tokserve.server.http.workers import off_loop
from tokserve.server.serving import Serving


class ClassifyBody(inputs.InputBody):
    """The body of /classify.  `use_activation` False: logits."""


class ClassifyItem(msgspec.Struct):
    """`label`: the most probable; `probs`: in the order of the labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct):
    """The reply of /classify."""

    id: str
    created: int
    model: str
    data: list[ClassifyItem]
    usage: PoolingUsage
    object: str = "list"


async def classify(serving: Serving, request: Request) -> Response:
    """POST /classify: probabilities of a classifier's labels for each input, or logits"""
    return await respond(serving, request, *await schemas.read_body(serving, request, ClassifyBody))


async def respond(serving: Serving, request: Request, body: ClassifyBody, ignored: list[str], size: int) -> Response:
    """Probabilities or logits of each input.  `size`: bytes of the body."""
    rules = inputs.label_rules(serving)
    if rules.tokens:
        raise RequestError("this model labels tokens: use /pooling", field="model", code=inputs.UNSUPPORTED)
    serving.requests.name_request(request, body)
    prompts = await off_loop(request, size, lambda: inputs.prompts_of(serving, body))
    bytes_of_one = len(rules.labels) * inputs.BYTES_OF_VALUE
    inputs.check_reply(serving, len(prompts) * bytes_of_one, inputs.fields_of(body).prompt, "fewer inputs")
    pooled = await inputs.pool(serving, request, body, rules.params, prompts, inputs.fields_of(body), ignored)
    name = serving.model.answers_as(body.model)
    return await off_loop(request, 1 << 20, lambda: _reply(request, body, rules, pooled, name))


def _reply(request: Request, body: ClassifyBody, rules: LabelRules, pooled: PooledPrompts, name: str) -> Response:
    items = []
    for index, vector in enumerate(pooled.vectors):
        values = rules.finish(vector, body.use_activation)
        items.append(ClassifyItem(index, rules.label(values), values.tolist(), len(values)))
    return bodies.reply(
        request, ClassifyReply(f"classify-{pooled.key}", int(time.time()), name, items, pooled.usage), pooled.headers
    )
