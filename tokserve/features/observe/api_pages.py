"""GET /docs and /redoc: pages that show /openapi.json.  Their scripts come from a public network, to the browser."""

from __future__ import annotations

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response

from tokserve.features.observe.status_page import without_pages
from tokserve.server.serving import Serving

SCHEMA = "openapi.json"  # beside the page, whatever path a proxy serves it at


NO_PAGES = "there are no pages on this server (--ui); GET /openapi.json"


async def swagger(serving: Serving, request: Request) -> Response:
    """GET /docs: the API as a page, to try it"""
    if not serving.config.server.ui:
        return without_pages(request, NO_PAGES)
    return get_swagger_ui_html(openapi_url=SCHEMA, title="tokserve")


async def redoc(serving: Serving, request: Request) -> Response:
    """GET /redoc: the API as a page, to read"""
    if not serving.config.server.ui:
        return without_pages(request, NO_PAGES)
    return get_redoc_html(openapi_url=SCHEMA, title="tokserve", with_google_fonts=False)
