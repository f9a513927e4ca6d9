"""The table of routes: the core's, and those of rooms."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import LONGEST_SHOWN, NotFound
from tokserve.base.rooms import Room, imported, rooms
from tokserve.config import Config, option_values
from tokserve.server import reply_types as types
from tokserve.server.admin import commands, state
from tokserve.server.endpoint import BODY, Endpoint
from tokserve.server.http.auth import route_path
from tokserve.server.http.errors import OPENAI, ErrorShape
from tokserve.server.serving import Serving
from tokserve.server.tokens import aborts, generate
from tokserve.server.tokens.generate_body import GenerateBody
from tokserve.server.tokens.generate_reply import GenerateReply

POST, GET = ("POST",), ("GET",)
METHODS = ("GET", "POST", "DELETE")
CORE = (
    Endpoint(
        POST,
        "/inference/v1/generate",
        generate.generate_tokens,
        GenerateBody,
        reply=GenerateReply,
        runner="generate",
    ),
    *(
        Endpoint(POST, path, handler, aborts.AbortBody, reply=aborts.AbortReply, raises=BODY)
        for path, handler in (
            ("/inference/v1/abort_requests", aborts.abort_requests),
            ("/abort_requests", aborts.abort_requests_or_all),
        )
    ),
    Endpoint(GET, "/liveness", state.liveness, reply=types.EmptyObject),
    Endpoint(GET, "/inference/v1/state", state.state, reply=types.ServerState, guarded=True),
    Endpoint(GET, "/kv_event_sources", state.kv_event_sources, reply=list[types.JsonObject], guarded=True),
    Endpoint(GET, "/is_paused", state.is_paused, reply=types.IsPaused, guarded=True),
    Endpoint(GET, "/is_sleeping", state.is_sleeping, reply=types.IsSleeping, guarded=True),
    Endpoint(GET, "/get_world_size", state.get_world_size, reply=types.WorldSize, query=(("include_dp", bool),)),
    *(
        Endpoint(POST, path, handler, kind, control=True, reply=reply)
        for path, handler, kind, reply in commands.routes()
    ),
)


def endpoints(config: Config) -> tuple[Endpoint, ...]:
    """The routes of a server: the core's, and those of rooms.  One that is served replaces others with the same path.

    A tokens-only server has routes that refuse in the place of those that need a tokenizer.
    """
    table = {endpoint.path: endpoint for endpoint in CORE}
    for room in _served_rooms(config):
        if room.endpoints:
            added = {endpoint.path: endpoint for endpoint in imported(room.endpoints)}
            table |= {path: one for path, one in added.items() if path not in table or one.is_served(config)}
        if not room.text_endpoints:
            continue
        if config.server.tokens_only:
            table |= {path: _without_text(path, room) for path in room.paths}
        else:
            table |= {endpoint.path: endpoint for endpoint in imported(room.text_endpoints)}
    return tuple(table.values())


def _served_rooms(config: Config) -> Iterator[Room]:
    chosen = {name for _, name, value in option_values(config) if value is True}
    return (room for room in rooms().values() if not room.needs or room.needs in chosen)


def _without_text(path: str, room: Room) -> Endpoint:
    shape: ErrorShape = imported(room.errors) if room.errors else OPENAI
    return Endpoint(METHODS, path, refuse_text_route, text=True, errors=shape)


async def refuse_text_route(serving: Serving, request: Request) -> Response:
    """404: the text routes of a tokens-only server"""
    raise NotFound(
        f"{route_path(request.scope)} needs a tokenizer, and this is a tokens-only server (--tokens-only): "
        "send token ids to /inference/v1/generate",
        code="tokens_only",
    )


def hint(path: str, table: Sequence[Endpoint]) -> str:
    """The end of an error about a path that no route has: the option that serves it, or a route with a like name."""
    for room in rooms().values():
        if room.needs and path in room.paths:
            return f"; it needs --{room.needs.replace('_', '-')}"
    suggestion = suggest_route(path, [endpoint.path for endpoint in CORE]) or suggest_route(
        path, [endpoint.path for endpoint in table]
    )
    return f"; did you mean {suggestion}?" if suggestion else ""


def suggest_route(path: str, routes: Sequence[str]) -> str | None:
    """The shortest route that ends with `path`, or with which `path` ends: base URLs lack /v1, or have it twice.  Else
    one that is written nearly so."""
    candidates = [route for route in routes if path and (route.endswith(path) or path.endswith(route))]
    candidates = candidates or difflib.get_close_matches(path[:LONGEST_SHOWN], routes, 1, cutoff=0.85)
    return min(candidates, key=len, default=None)
