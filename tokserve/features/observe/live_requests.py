"""GET /inference/v1/requests: the requests in flight of all API processes, for the status page."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import invalid
from tokserve.server.http import body
from tokserve.server.serving import Serving

DEFAULT_LIMIT, MAX_LIMIT = 100, 10_000


class LiveRequest(msgspec.Struct):
    """One HTTP request; counts are over its choices that have not ended, times are in seconds.

    `waits_for`, of a request without a slot: slot, memory, prefix, grammar, adapter, client or pause.
    """

    request_id: str
    group_id: str | None
    state: str
    waits_for: str | None
    choices: int
    running: int
    age: float
    queued: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int


class LiveRequests(msgspec.Struct):
    """The oldest of `total` requests."""

    weight_version: str
    epoch: int
    total: int
    requests: list[LiveRequest]


async def list_requests(serving: Serving, request: Request) -> Response:
    """GET /inference/v1/requests: live requests, oldest first, at most `?limit=`"""
    limit = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and int(limit) <= MAX_LIMIT):
        raise invalid("limit", f"must be 0 to {MAX_LIMIT}")
    reply = await serving.llm.call("requests", limit=int(limit))
    return body.reply(request, msgspec.convert(reply, LiveRequests))
