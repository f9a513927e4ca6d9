"""POST /abort_requests: ends requests by id, by group, or all of them, and reports the result of each.

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
from tokserve.server.http.body_reader import BodyReader
from tokserve.server.serving import Serving

MAX_IDS = 1 << 14  # ids that the engine looks up between two steps


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Which requests: exactly one of the fields.  An empty list aborts none."""

    request_ids: list[str] | None = None
    group_id: str | None = None
    all: bool | None = None


class AbortReply(msgspec.Struct):
    """The number of aborted requests, and the result for each id."""

    aborted: int
    results: dict[str, str]


async def read(request: Request, bodies: BodyReader) -> AbortBody:
    value, _ = await bodies.load(request)
    target = body.convert(value, AbortBody)
    selectors = [name for name in AbortBody.__struct_fields__ if getattr(target, name) not in (None, [], False, "")]
    if not selectors and target.request_ids is None:
        raise RequestError('give request_ids, group_id or "all": true', field="request_ids")
    if len(target.request_ids or ()) > MAX_IDS:
        raise invalid("request_ids", f"must have at most {MAX_IDS} entries")
    if len(selectors) > 1:
        raise RequestError(f"give only one of {' and '.join(selectors)}", field=selectors[1])
    return target


async def abort_requests(serving: Serving, request: Request) -> Response:
    """POST /abort_requests: end requests; replies after they have ended"""
    target = await read(request, serving.bodies)
    if target.all:
        results = await serving.llm.abort_all()
    elif target.group_id:
        results = await serving.llm.abort_group(target.group_id)
    else:
        results = await serving.llm.abort(target.request_ids or [])
    # each request once, by whatever form of its id
    aborted = {bare_id(name) for name, result in results.items() if result == "aborted"}
    return body.reply(request, AbortReply(len(aborted), results))
