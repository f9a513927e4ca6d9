"""A call of a route whose body has been read: what its handler needs until the reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tokserve.server.http import body as http_body
from tokserve.server.http.workers import off_loop
from tokserve.server.serving import Serving

B = TypeVar("B", covariant=True)
T = TypeVar("T")
SHOWN_PATH = re.compile(r"[A-Za-z_]\w*(?:\[\d+\])?(?:\.[A-Za-z_]\w*(?:\[\d+\])?)*", re.ASCII)  # of a field, in a header


@dataclass(frozen=True, slots=True)
class RouteCall(Generic[B]):
    """`body`: read and checked; `size`: its bytes.  `ignored`: its fields that have no effect."""

    serving: Serving
    request: Request
    body: B
    size: int
    ignored: list[str]

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the ignored fields, if there are any."""
        return ignored_header(self.ignored)

    @property
    def wants_msgpack(self) -> bool:
        """Whether the client prefers a reply in msgpack."""
        return http_body.wants_msgpack(self.request)

    def replaced(self, body: T, ignored: list[str]) -> RouteCall[T]:
        """The same call with the body of another route."""
        return RouteCall(self.serving, self.request, body, self.size, ignored)

    async def run(self, work: Callable[[], T], size: int | None = None) -> T:
        """The result of `work` on `size` bytes, default the body's; done in a thread unless it is small.  Raises
        `ClientDisconnected`."""
        return await off_loop(self.request, self.size if size is None else size, work)

    def reply(self, value: Any, headers: Mapping[str, str] | None = None) -> Response:
        """A 200 with `value`.  `headers`: in the place of `self.headers`."""
        return http_body.reply(self.request, value, dict(self.headers if headers is None else headers))


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header `X-Ignored-Fields`, if there are any; names that no header can contain are left out."""
    shown = [name for name in names if SHOWN_PATH.fullmatch(name)]
    return {"X-Ignored-Fields": ", ".join(shown)[:1000]} if shown else {}
