"""The routes of sessions, and those of the text dialects below the path of a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from tokserve.base.rooms import imported, rooms
from tokserve.features.sessions import handlers
from tokserve.features.sessions.replies import Format, Sequences, Shared, Tree
from tokserve.features.sessions.turns import Summary
from tokserve.server.endpoint import BODY, MISSING, Endpoint

GET, POST = ("GET",), ("POST",)
SESSION = "/sessions/{id}"
WRITES = BODY | {404, 409, 429}
READS = MISSING | {400, 503}
FORMAT = (("format", Format),)
# what an agent calls below the base URL of its session
BELOW = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/tokenize",
)


def _below() -> Iterator[Endpoint]:
    """The routes of other rooms below the path of a session, with the same handlers."""
    others = [room for room in rooms().values() if not room.needs]
    tables = [table for room in others for table in (room.endpoints, room.text_endpoints) if table]
    endpoints: list[Endpoint] = [endpoint for table in tables for endpoint in imported(table)]
    for path in BELOW:
        endpoint = next((one for one in endpoints if one.path == path), None)
        if endpoint is not None:
            yield replace(endpoint, path=SESSION + path)


SESSIONS = (
    Endpoint(
        ("GET", "POST"),
        "/sessions",
        handlers.sessions,
        handlers.CreateBody,
        guarded=True,
        reply=(handlers.SessionList, handlers.CreatedSession),
        raises=WRITES,
        query=(
            ("state", Literal["open", "idle", "closed"]),
            ("wait", float),
            ("limit", int),
            ("after", str),
            ("order", Literal["oldest", "newest"]),
        ),
    ),
    Endpoint(
        GET,
        "/sessions/next",
        handlers.take_next,
        guarded=True,
        reply=handlers.NextReply,
        raises=READS,
        query=(("wait", float), ("lease", float), *FORMAT),
    ),
    Endpoint(
        ("GET", "DELETE"),
        SESSION,
        handlers.session,
        guarded=True,
        reply=(Summary, handlers.DeletedSession),
        raises=READS,
    ),
    Endpoint(
        GET,
        SESSION + "/tree",
        handlers.tree,
        guarded=True,
        reply=Tree,
        raises=READS,
        query=(*FORMAT, ("messages", bool)),
    ),
    Endpoint(
        GET,
        SESSION + "/sequences",
        handlers.sequences,
        guarded=True,
        reply=Sequences,
        raises=READS,
        query=(*FORMAT, ("shared", Shared)),
    ),
    Endpoint(POST, SESSION + "/close", handlers.close, guarded=True, reply=Summary, raises=READS),
    Endpoint(
        POST,
        SESSION + "/metadata",
        handlers.add_metadata,
        handlers.MetadataBody,
        guarded=True,
        reply=Summary,
        raises=WRITES,
    ),
)
ENDPOINTS = (*SESSIONS, *_below())
