"""What is going on: the requests that have not ended, of all API processes, for people and the status page."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokserve.errors import RequestError
from tokserve.server import body
from tokserve.server.serving import Serving

SHOWN, MOST = 100, 10_000


async def requests(serving: Serving, request: Request) -> Response:
    """GET /inference/v1/requests: live requests, oldest first, at most `?limit=`; how many there are; the weights"""
    limit = request.query_params.get("limit", str(SHOWN))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and int(limit) <= MOST):
        raise RequestError(f"limit must be 0 to {MOST}", field="limit")
    return body.reply(request, await serving.llm.call("requests", limit=int(limit)))
