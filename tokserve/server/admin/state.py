"""GET routes about the engine's state, for trainers and probes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokserve.server.http import body
from tokserve.server.serving import Serving

NAMES = ("state", "weight_version", "epoch", "running", "waiting", "since", "reason", "paused_since")


async def is_paused(serving: Serving, request: Request) -> Response:
    """GET /is_paused: whether generation is paused"""
    return body.reply(request, {"is_paused": await serving.llm.is_paused()})


async def is_sleeping(serving: Serving, request: Request) -> Response:
    """GET /is_sleeping: whether any memory is asleep"""
    return body.reply(request, {"is_sleeping": await serving.llm.is_sleeping()})


async def state(serving: Serving, request: Request) -> Response:
    """GET /inference/v1/state: what the engine does, with which weights and arithmetic"""
    state = await serving.llm.call("state")
    arithmetic = serving.llm.ready.facts.get("arithmetic")
    return body.reply(request, {name: state[name] for name in NAMES} | {"arithmetic": arithmetic})


async def liveness(serving: Serving, request: Request) -> Response:
    """GET /liveness: whether the engine's loop runs"""
    await serving.probe("ping", serving.config.server.liveness_timeout)
    return body.reply(request, {})


async def get_world_size(serving: Serving, request: Request) -> Response:
    """GET /get_world_size: the server's number of ranks in a weight transfer"""
    return body.reply(request, {"world_size": 1})
