"""The routes that say what is served and how it goes."""

from __future__ import annotations

from typing import Literal

from tokserve.features.observe import api_pages, introspection, live_requests, load, status_page
from tokserve.server import reply_types as types
from tokserve.server.endpoint import ENGINE, HTML, MISSING, NEVER, TEXT, Endpoint

GET = ("GET",)
ENDPOINTS = (
    Endpoint(GET, "/v1/models", introspection.models, reply=introspection.ModelList),
    Endpoint(GET, "/v1/models/{id:path}", introspection.model, reply=introspection.ModelCard, raises=ENGINE | MISSING),
    Endpoint(GET, "/health", introspection.health, reply=types.EmptyObject, query=(("deep", bool),)),
    Endpoint(("GET", "POST"), "/ping", introspection.health, reply=types.EmptyObject, query=(("deep", bool),)),
    Endpoint(
        GET, "/ready", introspection.readiness, reply=introspection.Readiness, also=((503, introspection.Readiness),)
    ),
    Endpoint(GET, "/version", introspection.version, reply=types.Version, raises=NEVER),
    Endpoint(GET, "/metrics", introspection.prometheus_metrics, reply=TEXT, guarded=True),
    Endpoint(
        GET,
        "/load",
        load.load,
        reply=load.ServerLoad,
        guarded=True,
        raises=ENGINE | {400},
        query=(("include_inflight", bool), ("inflight_limit", int)),
    ),
    Endpoint(
        GET,
        "/server_info",
        introspection.configuration,
        reply=types.JsonObject,
        guarded=True,
        raises=ENGINE | {400},
        query=(("config_format", Literal["json", "text"]),),
    ),
    Endpoint(GET, "/openapi.json", introspection.openapi_schema, reply=types.JsonObject, raises=NEVER),
    Endpoint(GET, "/docs", api_pages.swagger, reply=HTML, page=True, raises=NEVER),
    Endpoint(GET, "/redoc", api_pages.redoc, reply=HTML, page=True, raises=NEVER),
    Endpoint(
        GET,
        "/inference/v1/requests",
        live_requests.list_requests,
        reply=live_requests.LiveRequests,
        control=True,
        query=(("limit", int),),
    ),
    Endpoint(GET, "/", status_page.page, reply=HTML, page=True, raises=NEVER),
)
