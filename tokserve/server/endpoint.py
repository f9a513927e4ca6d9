"""What a route declares: its body, its replies, the errors it can answer with, and when it is served.

The table in `app` is made of these.  Routing, keys, /openapi.json and docs/routes.md are all made from that table.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tokserve.config import Config
from tokserve.server.http.auth import PUBLIC
from tokserve.server.http.errors import OPENAI, ErrorShape
from tokserve.server.serving import Serving

Handler = Callable[[Serving, Request], Awaitable[Response]]
Body = type[msgspec.Struct] | type[BaseModel]

# statuses of errors: of a route that needs the engine, reads a body, commands the engine, makes text of a prompt,
# has vectors made, generates
ENGINE = frozenset({503})
BODY = ENGINE | {400, 408, 413, 415}
COMMAND = BODY | {404, 409, 502}
PROMPT = BODY | {404, 422, 502}
POOLING = BODY | {404, 409, 429}
GENERATION = PROMPT | POOLING
MISSING = frozenset({404})
NEVER: frozenset[int] = frozenset()  # a route that needs nothing


class Content(NamedTuple):
    """A reply that is not JSON: its media type, or "" for a reply without a body."""

    media: str


HTML, TEXT, OCTETS, EMPTY = map(Content, ("text/html", "text/plain", "application/octet-stream", ""))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route: its handler, and the types of its body and replies.

    `reply`: of a 200, a type that is sent as JSON, `Content`, or several of them; None: it always refuses.
    `also`: replies of other statuses beside errors.  `raises`: statuses of errors, without those that follow from
    `control` and from keys; None: those of a command or of a body.  `query`: parameters in the query, with their
    types.  `text`: needs a tokenizer.  `page`: needs --ui.  `runner`: the runner that it needs.  `control`: a control
    route, for which `auth` has rules of its own.  `guarded`: its hosts are checked.  `errors`: the shape of its errors.
    `msgpack`: replies in JSON are sent as msgpack where a client asks for it.
    """

    methods: tuple[str, ...]
    path: str
    handler: Handler
    body: Body | None = None
    text: bool = False
    reply: Any = None
    control: bool = False
    errors: ErrorShape = OPENAI
    guarded: bool = False
    page: bool = False
    runner: Literal["generate", "pooling"] | None = None
    raises: frozenset[int] | None = None
    also: tuple[tuple[int, Any], ...] = ()
    query: tuple[tuple[str, Any], ...] = ()
    msgpack: bool = True

    @property
    def replies(self) -> tuple[Any, ...]:
        """The forms of a 200."""
        if self.reply is None:
            return ()
        return self.reply if isinstance(self.reply, tuple) and not isinstance(self.reply, Content) else (self.reply,)

    @property
    def statuses(self) -> frozenset[int]:
        """The statuses of errors that it can answer with."""
        raised = self.raises
        if raised is None:
            raised = COMMAND if self.control else ENGINE if self.body is None else GENERATION
        by_keys = {401} if self.path.rstrip("/") not in PUBLIC else set()
        by_hosts = {403} if self.control or self.guarded else set()
        return frozenset({self.errors.status_of(status) for status in {500} | raised | by_keys | by_hosts})

    @property
    def streams(self) -> bool:
        """Whether the body can ask for events."""
        if self.body is None or self.reply is None:
            return False
        fields = self.body.model_fields if issubclass(self.body, BaseModel) else self.body.__struct_fields__
        return "stream" in fields

    @property
    def summary(self) -> str:
        """What the handler's docstring says after the route."""
        line = (inspect.getdoc(self.handler) or "").partition("\n")[0]
        return line.partition(": ")[2] or line

    def is_served(self, config: Config) -> bool:
        """Whether a server with this configuration has the route; if not, it answers with the reason."""
        if (self.text and config.server.tokens_only) or (self.page and not config.server.ui):
            return False
        return self.runner is None or (self.runner == "pooling") == (config.model.runner == "pooling")
