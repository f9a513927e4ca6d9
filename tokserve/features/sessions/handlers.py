"""The routes of sessions for agents' environments and trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import EngineDead, invalid
from tokserve.features.sessions import replies
from tokserve.features.sessions.access import cache_key, owner_of, sessions_of
from tokserve.features.sessions.calls import (
    AddMetadata,
    CloseSession,
    CreateSession,
    DeleteSession,
    ListSessions,
    NextSession,
    ReadSession,
    SummarizeSession,
)
from tokserve.features.sessions.replies import Encoding, Format, LeafSequence, Sequences, Shared, Tree
from tokserve.features.sessions.store import check_id
from tokserve.features.sessions.turns import Session, Summary
from tokserve.server.http import body, workers
from tokserve.server.http.body import convert
from tokserve.server.http.disconnect import CancelOnDisconnect
from tokserve.server.serving import Serving

STATES = ("open", "idle", "closed")
ORDERS = ("oldest", "newest")  # what comes first
DEFAULT_LIMIT, MAX_LIMIT = 1000, 100_000
DEFAULT_LEASE, MAX_SECONDS = 600.0, 86_400.0
SPARE_DEPTH = 100  # levels of nesting that replies and messages add to metadata


class CreateBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A session that is to be made; without an id it gets one."""

    session_id: str | None = None
    metadata: dict[str, Any] = {}


class CreatedSession(msgspec.Struct):
    """The id of the session, and the path below which its routes are, with the id as a path has it."""

    session_id: str
    base_path: str


class MetadataBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Names and values that are added to the metadata of a session or, with `turn_id`, of one of its turns.  A body
    without the field `metadata` is itself what is added to the session's."""

    metadata: dict[str, Any]
    turn_id: str | None = None


class SessionList(msgspec.Struct):
    """Sessions; those that were used last come last, or first with `order=newest`."""

    sessions: list[Summary]


class NextReply(msgspec.Struct):
    """A closed session for a trainer, with its sequences; null: there was none in time.  It is the trainer's until
    `lease_end`, in seconds since 1970; DELETE acknowledges it."""

    session_id: str | None = None
    lease_end: float | None = None
    metadata: dict[str, Any] | None = None
    tree: Tree | None = None


class DeletedSession(msgspec.Struct):
    """The session that is gone."""

    session_id: str
    deleted: bool = True


async def create_session(serving: Serving, request: Request) -> Response:
    """POST /sessions: make a session"""
    raw = await serving.bodies.read(request)
    given = convert(await serving.bodies.decode(request, raw) if raw else {}, CreateBody)
    if given.session_id is not None:
        check_id(given.session_id)
    _check_metadata(given.metadata)
    call = CreateSession(owner_of(request), given.session_id, given.metadata)
    session_id = await sessions_of(serving).call(call)
    return body.reply(request, CreatedSession(session_id, f"/sessions/{quote(session_id, safe='')}"))


async def list_sessions(serving: Serving, request: Request) -> Response:
    """GET /sessions: the sessions of the caller's key, in one `state` or in any"""
    state = request.query_params.get("state")
    if state is not None and state not in STATES:
        raise invalid("state", f"must be one of {', '.join(STATES)}")
    limit = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= MAX_LIMIT):
        raise invalid("limit", f"must be 1 to {MAX_LIMIT}")
    after = request.query_params.get("after")
    order = request.query_params.get("order", ORDERS[0])
    if order not in ORDERS:
        raise invalid("order", f"must be one of {', '.join(ORDERS)}")
    wait = _seconds(request, "wait", 0.0)
    call = ListSessions(owner_of(request), state, int(limit), after, wait, newest_first=order == ORDERS[1])
    async with CancelOnDisconnect(request.receive):
        listed = await sessions_of(serving).call(call)
    size = workers.ITEM * len(listed) + workers.SMALL * any(one.metadata for one in listed)
    return await workers.off_loop(request, size, lambda: body.reply(request, SessionList(listed)))


async def sessions(serving: Serving, request: Request) -> Response:
    """GET /sessions: the sessions of the caller's key, in one `state` or in any; POST makes one"""
    return await (create_session if request.method == "POST" else list_sessions)(serving, request)


async def get_session(serving: Serving, request: Request) -> Response:
    """GET /sessions/{id}: a session without its turns"""
    summary = await sessions_of(serving).call(SummarizeSession(owner_of(request), _id(request)))
    return body.reply(request, summary)


async def delete(serving: Serving, request: Request) -> Response:
    """DELETE /sessions/{id}: drop a session, or acknowledge one that was taken"""
    owner, session_id = owner_of(request), _id(request)
    await sessions_of(serving).call(DeleteSession(owner, session_id))
    await _release_blocks(serving, owner, session_id)
    return body.reply(request, DeletedSession(session_id))


async def session(serving: Serving, request: Request) -> Response:
    """GET /sessions/{id}: a session without its turns; DELETE drops it, which acknowledges one that was taken"""
    return await (delete if request.method == "DELETE" else get_session)(serving, request)


async def close(serving: Serving, request: Request) -> Response:
    """POST /sessions/{id}/close: no request is expected any more, so a trainer may take the session"""
    owner, session_id = owner_of(request), _id(request)
    summary = await sessions_of(serving).call(CloseSession(owner, session_id))
    await _release_blocks(serving, owner, session_id)
    return body.reply(request, summary)


async def _release_blocks(serving: Serving, owner: str, session_id: str) -> None:
    """The session has no more turns: its blocks in the KV cache are like those of others."""
    with suppress(EngineDead):  # then nothing is cached
        await serving.llm.call("release_session", session=cache_key(owner, session_id))


async def add_metadata(serving: Serving, request: Request) -> Response:
    """POST /sessions/{id}/metadata: add names, such as a reward, to the metadata of a session or a turn"""
    value, _ = await serving.bodies.load(request)
    is_bare = isinstance(value, dict) and "metadata" not in value and "turn_id" not in value
    given = convert({"metadata": value} if is_bare else value, MetadataBody)
    _check_metadata(given.metadata)
    call = AddMetadata(owner_of(request), _id(request), given.metadata, given.turn_id)
    return body.reply(request, await sessions_of(serving).call(call))


async def tree(serving: Serving, request: Request) -> Response:
    """GET /sessions/{id}/tree: all turns, token for token"""
    form = _format(request)
    encoding: Encoding = "msgpack" if body.wants_msgpack(request) else "json"
    messages = encoding if _flag(request, "messages") else None
    session = await sessions_of(serving).call(ReadSession(owner_of(request), _id(request)))
    turns = list(session.turns.values())

    def work() -> Response:
        rows = [replies.tree_turn(turn, form, messages=messages) for turn in turns]
        return body.reply(request, _tree(session, rows))

    return await workers.off_loop(request, session.num_bytes, work)


async def sequences(serving: Serving, request: Request) -> Response:
    """GET /sessions/{id}/sequences: a row of ids, logprobs and a loss mask for each leaf"""
    form = _format(request)
    shared = request.query_params.get("shared", "once")
    if shared not in get_args(Shared):
        raise invalid("shared", f"must be one of {', '.join(get_args(Shared))}")
    session = await sessions_of(serving).call(ReadSession(owner_of(request), _id(request)))
    turns = list(session.turns.values())

    def work() -> Response:
        rows: list[LeafSequence] = replies.leaf_sequences(turns, form, "all" if shared == "all" else "once")
        return body.reply(request, Sequences(session_id=session.session_id, metadata=session.metadata, sequences=rows))

    return await workers.off_loop(request, session.num_bytes, work)


async def take_next(serving: Serving, request: Request) -> Response:
    """GET /sessions/next: a closed session that no trainer has, for `lease` seconds"""
    form = _format(request)
    wait, lease = _seconds(request, "wait", 0.0), _seconds(request, "lease", DEFAULT_LEASE)
    async with CancelOnDisconnect(request.receive):  # so that a session is given to one who is there
        session: Session | None = await sessions_of(serving).call(NextSession(owner_of(request), wait, lease))
    if session is None:
        return body.reply(request, NextReply())
    turns, taken = list(session.turns.values()), session

    def work() -> Response:
        rows = [replies.tree_turn(turn, form) for turn in turns]
        shown = NextReply(taken.session_id, taken.lease_end, taken.metadata, _tree(taken, rows))
        return body.reply(request, shown)

    return await workers.off_loop(request, session.num_bytes, work)


def _tree(session: Session, rows: list[replies.TreeTurn]) -> Tree:
    return Tree(session_id=session.session_id, state=session.state, metadata=session.metadata, turns=rows)


def _id(request: Request) -> str:
    session_id: str = request.path_params["id"]
    return session_id


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise RequestError for what not every reply with it could have, in JSON or msgpack."""
    nested: Any = metadata
    for _ in range(SPARE_DEPTH):
        nested = [nested]
    try:
        body.encode_msgpack(nested)
    except OverflowError:
        raise invalid("metadata", "must have integers of at most 64 bits; write others as strings") from None
    except RecursionError:
        raise invalid("metadata", "is nested too deeply") from None


def _seconds(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= MAX_SECONDS:
        raise invalid(name, f"must be a number of seconds from 0 to {MAX_SECONDS:g}")
    return seconds


def _format(request: Request) -> Format:
    form = request.query_params.get("format", "arrays")
    if form not in get_args(Format):
        raise invalid("format", f"must be one of {', '.join(get_args(Format))}")
    return "base64" if form == "base64" else "arrays"


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "0").lower() not in ("0", "false", "")
