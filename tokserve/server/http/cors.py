"""Cross-origin requests (CORS): answers browsers' preflights, and tells them which pages may read replies.

The middleware is Starlette's.  It stands before the check of API keys: a preflight has no key, and a page may read why
it was refused.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from tokserve.config import CorsConfig
from tokserve.config.cors import ANY

EXPOSED = ("Retry-After", "X-Ignored-Fields", "X-Request-Id", "X-Waited-For", "endpoint-load-metrics")


def add_cors(app: FastAPI, cors: CorsConfig) -> None:
    """Let pages of the allowed origins, if there are any, use the application.  Call it after other middleware has been
    added: the last one comes first."""
    if cors.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.allowed_origins,
            allow_methods=cors.allowed_methods or [ANY],
            allow_headers=cors.allowed_headers or [ANY],
            allow_credentials=cors.allow_credentials,
            expose_headers=EXPOSED,
        )
