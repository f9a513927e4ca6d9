"""GET /: the status page, one file (`status_page.html`) that uses only routes of this server.

The Content-Security-Policy allows its style and its script by their hashes, so that no injected script can run.  The
page holds no data: it requests what it shows with the API key that the user enters.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from html import escape
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tokserve.base.errors import NotFound
from tokserve.server.serving import Serving

NO_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>tokserve</title>
<h1>tokserve</h1>
<p>This server answers: {why}.</p>
<p>Links: <a href="openapi.json">the description of the API</a>, <a href="health">its health</a>,
<a href="version">its version</a>. With the option <code>--ui</code> there are a status page here and pages of the API
at <code>/docs</code> and <code>/redoc</code>.</p>
</html>
"""
FILE = Path(__file__).with_name("status_page.html")


@cache
def _load() -> tuple[bytes, dict[str, str]]:
    text = FILE.read_text(encoding="utf-8")
    style, script = (_digest(text, tag) for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return text.encode(), headers


def _digest(text: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


def without_pages(request: Request, why: str) -> Response:
    """404: as a page for browsers, for others as the error that other unknown routes have."""
    if "text/html" not in request.headers.get("accept", ""):
        raise NotFound(why, code="unknown_route")
    headers = {"Content-Security-Policy": "default-src 'none'", "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(NO_PAGE.format(why=escape(why)), 404, headers)


async def page(serving: Serving, request: Request) -> Response:
    """GET /: the status page"""
    if not serving.config.server.ui:
        return without_pages(request, "there is no status page (--ui); GET /openapi.json describes the API")
    text, headers = _load()
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")
