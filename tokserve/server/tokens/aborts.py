"""Routes that end requests by id, by group, or all of them, and report the result of each.

`/inference/v1/abort_requests` needs to be told which; `/abort_requests` without any aborts all: vLLM's clients drain an
engine with it.

The engine aborts requests of every API process and frees them before the reply is sent.  The clients that sent the
requests get the output so far.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.client.inputs import bare_id
from tokserve.server.http import body
from tokserve.server.serving import Serving

MAX_IDS = 1 << 14  # ids that the engine looks up between two steps


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Which requests: at most one of the fields."""

    request_ids: list[str] | None = None
    group_id: str | None = None
    all: bool | None = None


class AbortReply(msgspec.Struct):
    """The number of aborted requests, and the result for each id."""

    aborted: int
    results: dict[str, str]
    status: str = "aborted"


async def abort_requests(serving: Serving, request: Request) -> Response:
    """POST /inference/v1/abort_requests: end requests by id or group; replies after they have ended"""
    value, _ = await serving.bodies.load(request)
    return await _abort(serving, request, read_target(value))


async def abort_requests_or_all(serving: Serving, request: Request) -> Response:
    """POST /abort_requests: end requests by id or group, or all if none are named; replies after they have ended"""
    raw = await serving.bodies.read(request)
    has_body = bool(raw) or "content-type" in request.headers  # one that was cut is not "no body"
    value = await serving.bodies.decode(request, raw) if has_body else {}
    names_none = isinstance(value, dict) and value.keys() <= {"request_ids"} and value.get("request_ids") in (None, [])
    return await _abort(serving, request, AbortBody(all=True) if names_none else read_target(value))


def read_target(value: object) -> AbortBody:
    """Which requests a body names.  Raises RequestError."""
    target = body.convert(value, AbortBody)
    selectors = [name for name in AbortBody.__struct_fields__ if getattr(target, name) not in (None, [], False, "")]
    if not selectors and target.request_ids is None:
        raise RequestError('give request_ids, group_id or "all": true', field="request_ids")
    if len(target.request_ids or ()) > MAX_IDS:
        raise invalid("request_ids", f"must have at most {MAX_IDS} entries")
    if len(selectors) > 1:
        raise RequestError(f"give only one of {' and '.join(selectors)}", field=selectors[1])
    return target


async def _abort(serving: Serving, request: Request, target: AbortBody) -> Response:
    if target.all:
        results = await serving.llm.abort_all()
    elif target.group_id:
        results = await serving.llm.abort_group(target.group_id)
    else:
        results = await serving.llm.abort(target.request_ids or [])
    # each request once, by whatever form of its id
    aborted = {bare_id(name) for name, result in results.items() if result == "aborted"}
    return body.reply(request, AbortReply(len(aborted), results))
