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
from tokserve.server.route_call import RouteCall
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
    return await respond(await schemas.read_body(serving, request, ClassifyBody))


async def respond(call: RouteCall[ClassifyBody]) -> Response:
    """Probabilities or logits of each input."""
    serving, body = call.serving, call.body
    rules = inputs.label_rules(serving)
    if rules.tokens:
        raise RequestError("this model labels tokens: use /pooling", field="model", code=inputs.UNSUPPORTED)
    serving.requests.name_request(call.request, body)
    prompts = await call.run(lambda: inputs.prompts_of(serving, body))
    bytes_of_one = len(rules.labels) * inputs.BYTES_OF_VALUE
    inputs.check_reply(serving, len(prompts) * bytes_of_one, inputs.fields_of(body).prompt, "fewer inputs")
    pooled = await inputs.pool(call, rules.params, prompts, inputs.fields_of(body))
    return await call.run(lambda: _reply(call, rules, pooled), inputs.REPLY_BYTES)


def _reply(call: RouteCall[ClassifyBody], rules: LabelRules, pooled: PooledPrompts) -> Response:
    items = []
    for index, vector in enumerate(pooled.vectors):
        values = rules.finish(vector, call.body.use_activation)
        items.append(ClassifyItem(index, rules.label(values), values.tolist(), len(values)))
    name = call.serving.model.answers_as(call.body.model)
    reply = ClassifyReply(f"classify-{pooled.key}", int(time.time()), name, items, pooled.usage)
    return call.reply(reply, pooled.headers)
