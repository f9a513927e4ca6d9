"""GET /: the status page, one file (`status_page.html`) that uses only routes of this server.

The Content-Security-Policy allows its style and its script by their hashes, so that no injected script can run.  The
page holds no data: it requests what it shows with the API key that the user enters.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from tokserve.errors import NotFound
from tokserve.server.serving import Serving

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


async def page(serving: Serving, request: Request) -> Response:
    """GET /: the status page"""
    if not serving.config.server.ui:
        raise NotFound("there is no status page (--ui)", code="unknown_route")
    text, headers = _load()
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")
