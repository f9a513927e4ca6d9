"""GET routes about the engine's state, for trainers and probes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokserve.server.http import body
from tokserve.server.serving import Serving

NAMES = ("state", "weight_version", "epoch", "running", "waiting", "since", "reason", "paused_since")
ENGINES = "engines"  # of each engine the same, where there are several


async def is_paused(serving: Serving, request: Request) -> Response:
    """GET /is_paused: whether generation is paused"""
    return body.reply(request, {"is_paused": await serving.llm.is_paused()})


async def is_sleeping(serving: Serving, request: Request) -> Response:
    """GET /is_sleeping: whether any memory is asleep"""
    return body.reply(request, {"is_sleeping": await serving.llm.is_sleeping()})


async def state(serving: Serving, request: Request) -> Response:
    """GET /inference/v1/state: the engine's state, weights and arithmetic"""
    state = await serving.llm.call("state")
    arithmetic = serving.llm.ready.facts.get("arithmetic")
    reply = {name: state[name] for name in NAMES} | {"arithmetic": arithmetic}
    parallel = serving.config.parallel
    if parallel.num_ranks > 1:
        reply |= {name: getattr(parallel, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    if ENGINES in state:
        reply[ENGINES] = [{name: one[name] for name in ("engine", *NAMES)} for one in state[ENGINES]]
    return body.reply(request, reply)


async def liveness(serving: Serving, request: Request) -> Response:
    """GET /liveness: whether the engine's loop runs"""
    await serving.probe("ping", serving.config.server.liveness_timeout)
    return body.reply(request, {})


async def kv_event_sources(serving: Serving, request: Request) -> Response:
    """GET /kv_event_sources: where each engine publishes KV events; empty without --kv-events-config"""
    return body.reply(request, await serving.llm.call("kv_event_sources"))


async def get_world_size(serving: Serving, request: Request) -> Response:
    """GET /get_world_size: the server's ranks in a weight transfer; `?include_dp=false`: those of one engine"""
    all_engines = request.query_params.get("include_dp", "true").lower() not in ("0", "false")
    ranks = serving.config.parallel.num_ranks
    return body.reply(request, {"world_size": ranks * (serving.llm.num_engines if all_engines else 1)})
