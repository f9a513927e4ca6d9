"""SkyRL's own route for rollouts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokserve.server.serving import Serving
from tokserve.server.tokens import generate


async def generate_rollouts(serving: Serving, request: Request) -> Response:
    """POST /skyrl/v1/generate: as /inference/v1/generate; routed experts are an object in the smallest dtype"""
    return await generate.respond(serving, request, routed_format="compact")
