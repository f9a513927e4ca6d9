"""GET /load: how much there is to do, and with `?include_inflight=true` what is in flight in each engine.

Who drains a server aborts its requests and polls until the numbers of all queues are 0.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import invalid
from tokserve.features.observe.introspection import FRESH_SECONDS
from tokserve.features.observe.observers import metrics_of
from tokserve.server.http import body
from tokserve.server.serving import Serving

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000  # requests that are named of each engine
FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}


class QueuedRequest(TypedDict):
    """A request without its contents; `age` in seconds."""

    request_id: str
    status: str
    age: float
    num_prompt_tokens: int
    num_output_tokens: int


class LoadQueue(TypedDict):
    """The running or the waiting requests of an engine; each choice counts, and the oldest requests are named."""

    name: str
    num_requests: int
    requests: list[QueuedRequest]


class EngineQueues(TypedDict):
    data_parallel_rank: int
    queues: list[LoadQueue]


class ServerLoad(TypedDict):
    """HTTP requests of this API process, and requests of the engine."""

    server_load: int
    running: int
    waiting: int
    inflight: NotRequired[list[EngineQueues]]


async def load(serving: Serving, request: Request) -> Response:
    """GET /load: HTTP requests in flight, and the engine's running and waiting requests"""
    include, limit = _query(request)
    inflight = await _inflight(serving, limit) if include else None
    await serving.llm.refresh(FRESH_SECONDS)
    stats = serving.llm.stats
    reply = ServerLoad(server_load=metrics_of(serving).inflight, running=stats.running, waiting=stats.waiting)
    return body.reply(request, reply if inflight is None else reply | {"inflight": inflight})


def _query(request: Request) -> tuple[bool, int]:
    """Whether to list requests, and how many of an engine at most."""
    text = request.query_params.get("include_inflight", "")
    if text.lower() not in FLAGS:
        raise invalid("include_inflight", "must be true or false")
    limit = request.query_params.get("inflight_limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and int(limit) <= MAX_LIMIT):
        raise invalid("inflight_limit", f"must be 0 to {MAX_LIMIT}")
    return FLAGS[text.lower()], int(limit)


async def _inflight(serving: Serving, limit: int) -> list[EngineQueues]:
    listed: dict[str, Any] = await serving.llm.call("requests", limit=limit * len(serving.llm.reports))
    await serving.llm.call("stats")  # however long a step takes: who drains must not read old numbers
    queues = []
    for report in serving.llm.reports:
        rows = [row for row in listed["requests"] if row.get("engine", report.rank) == report.rank]
        running = [row for row in rows if row["state"] == "running"]
        waiting = [row for row in rows if row["state"] != "running"]
        stats = report.stats
        queues.append(
            EngineQueues(
                data_parallel_rank=report.rank,
                queues=[
                    LoadQueue(name="running", num_requests=stats.running, requests=_named(running[:limit])),
                    LoadQueue(name="waiting", num_requests=stats.waiting, requests=_named(waiting[:limit])),
                ],
            )
        )
    return queues


def _named(rows: list[dict[str, Any]]) -> list[QueuedRequest]:
    return [
        QueuedRequest(
            request_id=row["request_id"],
            status=row["state"],
            age=row["age"],
            num_prompt_tokens=row["prompt_tokens"],
            num_output_tokens=row["output_tokens"],
        )
        for row in rows
    ]
