"""The HTTP application: the table of routes, the check of API keys, and error responses.

Handlers are functions of (serving, request) that raise `RequestError`s.  These and all other exceptions become error
responses of one form here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import tokserve
from tokserve.base.errors import LONGEST_SHOWN, NotFound, RequestError, RequestFailed, Unauthorized
from tokserve.base.rooms import contributions
from tokserve.base.structs import prepare_structs
from tokserve.client.async_llm import AsyncLLM
from tokserve.config import Config
from tokserve.server import openapi
from tokserve.server.api_process import ApiProcess
from tokserve.server.endpoint import Endpoint, Handler
from tokserve.server.http import body, errors
from tokserve.server.http.auth import Keys, RoutePaths, route_path
from tokserve.server.http.cors import add_cors
from tokserve.server.http.disconnect import ClientDisconnected
from tokserve.server.http.request_ids import RequestIds
from tokserve.server.request_starter import GIVEN_ID, PREPARATION
from tokserve.server.routes import endpoints, hint
from tokserve.server.serving import SERVING, Serving, Trace

logger = logging.getLogger(__name__)

WAITED = "X-Waited-For"  # the header of a reply whose request came when no tokens were made: the state


class EndpointRoute(APIRoute):
    """A route of FastAPI whose handler gets the request as it is: it reads the body itself, with msgspec, and makes
    its reply.  What FastAPI is told of body and replies is for the document."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


class Api(FastAPI):
    """FastAPI, with the schemas of bodies and replies in its OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            serving = self.state.serving
            names = None if serving.config.lora.enable_lora else serving.model.names
            served = [endpoint for endpoint in self.state.table if endpoint.is_served(serving.config)]
            self.openapi_schema = openapi.document(super().openapi(), served, names)
        return self.openapi_schema


def build_app(
    llm: AsyncLLM,
    config: Config,
    *,
    keep_alive: float = 15.0,
    api_process: ApiProcess | None = None,
    trace: Trace | None = None,
) -> FastAPI:
    """The application.  `config` is resolved; `llm` must be started before the first request.

    Raises StartError for a chat template, a parser or a generation_config.json that cannot be used.
    `app.state.draining = True` makes it refuse new requests (503) while the old ones end.
    `keep_alive`: seconds without data after which a stream sends a comment.  `api_process`: which of
    several API processes this is.  `trace`: makes an observer for each request from its headers.
    """
    app = Api(
        title="tokserve",
        version=tokserve.__version__,
        openapi_url=None,
        openapi_tags=openapi.TAGS,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # FastAPI's; ours are in `tracing` and `metrics`
    )
    app.state.draining = False
    app.state.serving = serving = Serving(
        llm, config, app.state, keep_alive=keep_alive, api_process=api_process, trace=trace
    )
    if serving.text:
        for _, start in contributions("text_start"):
            start(serving)
    app.state.table = table = endpoints(config)
    app.state.headers = [headers for _, headers in contributions("headers")]
    for endpoint in table:
        app.router.routes += _routes(endpoint, endpoint.is_served(config))
    server = config.server
    hosts = server.allowed_hosts
    keys = Keys(
        server.api_key or [],
        server.admin_api_key or [],
        remote_control=server.allow_remote_control,
        control=RoutePaths(endpoint.path for endpoint in table if endpoint.control),
        hosts=None if hosts is None or "*" in hosts else hosts,
        guarded=RoutePaths(endpoint.path for endpoint in table if endpoint.guarded),
    )
    app.add_middleware(Guard, keys=keys, endpoints=table)
    app.add_middleware(RequestIds, makes_ids=config.replies.enable_request_id_headers)
    add_cors(app, config.cors)
    app.add_exception_handler(HTTPException, _http_error)
    prepare_structs()
    return app


@cache
def _routes(endpoint: Endpoint, is_served: bool) -> tuple[Route, ...]:
    """A route for each method, as FastAPI's document has an operation for each; HEAD goes with GET.  They hold nothing
    of a server: a process makes them once, however many applications it has."""
    handler = _with_error_responses(endpoint.handler, endpoint)
    routes: list[Route] = []
    for method in endpoint.methods:
        routes.append(
            EndpointRoute(
                endpoint.path,
                handler,
                methods=[method],
                name=endpoint.path,
                response_model=None,
                response_class=Response,
                status_code=200 if endpoint.replies else min(endpoint.statuses),
                include_in_schema=is_served,
                **openapi.route_options(endpoint, method),
            )
        )
        if method == "GET":
            routes.append(Route(endpoint.path, handler, methods=["HEAD"], include_in_schema=False))
    return tuple(routes)


def _with_error_responses(handler: Handler, endpoint: Endpoint) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The handler, with exceptions turned into responses, in a task named after the route."""

    async def respond(request: Request) -> Response:
        if task := asyncio.current_task():
            task.set_name(f"{request.method} {endpoint.path}")
        serving: Serving = request.app.state.serving
        state = serving.llm.status.state
        try:
            response = await handler(serving, request)
            if endpoint.runner and state not in SERVING:  # it has waited, or its stream will
                response.headers[WAITED] = state
            if endpoint.runner:
                for headers in request.app.state.headers:
                    response.headers.update(headers(request, serving.llm))
            return response
        except RequestError as error:
            if endpoint.runner:
                serving.log_refusal(request, error)
            return errors.response(error, _echoed_id(request), endpoint.errors)
        except ClientDisconnected:
            return Response(status_code=499)  # not sent: the client has disconnected
        except RecursionError as error:  # of code that follows the body's nesting
            return errors.response(errors.malformed(error, "this route"), _echoed_id(request), endpoint.errors)
        except Exception:
            logger.exception("%s %s failed", request.method, request.url.path)
            return errors.response(RequestFailed("internal error"), _echoed_id(request), endpoint.errors)
        finally:
            serving.bodies.end(request)
            if PREPARATION in request.scope:
                request.scope[PREPARATION].end()

    return respond


def _echoed_id(request: Request) -> dict[str, str]:
    """The header with the client's request id, for errors; an id in the body is known once that has been read."""
    try:
        request_id = request.scope.get(GIVEN_ID) or body.given_request_id(request, None)
    except RequestError:
        return {}
    return {"X-Request-Id": request_id} if request_id else {}


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's errors (no such route, wrong method) as error responses."""
    assert isinstance(error, HTTPException)
    table = request.app.state.table
    whole = route_path(request.scope)
    path, shape = whole[:LONGEST_SHOWN] or "/", _errors_of(whole, table)
    if error.status_code == 404:
        return errors.response(
            NotFound(f"there is no route {path}{hint(whole, table)}", code="unknown_route"), None, shape
        )
    if error.status_code == 405:
        routes = [r for r in request.app.router.routes if r.matches(request.scope)[0] != Match.NONE]
        allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
        patterns = [route.path for route in routes if "{" in route.path]
        if request.method == "POST" and len(patterns) == len(routes):  # the name of an action, and not of a thing
            missing = NotFound(
                f"there is no route {request.method} {path}; {patterns[0]} takes {allowed}", code="unknown_route"
            )
            return errors.response(missing, {"Allow": allowed}, shape)
        wrong_method = errors.WrongMethod(f"{path} takes {allowed}, not {request.method}")
        return errors.response(wrong_method, {"Allow": allowed}, shape)
    return errors.response(RequestError(str(error.detail)), error.headers, shape)


def _errors_of(path: str, table: Sequence[Endpoint]) -> errors.ErrorShape:
    """The shape of errors at a path, which need not be a route's: that of a route it is, or is below."""
    shapes = (route.errors for route in table if path == route.path or path.startswith(route.path + "/"))
    return next(shapes, errors.OPENAI)


class Guard:
    """Middleware that refuses requests without the key that their path needs."""

    def __init__(self, app: ASGIApp, keys: Keys, endpoints: Sequence[Endpoint]) -> None:
        self._app = app
        self._keys = keys
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = _with_one_prefix(scope)
            try:
                self._keys.check(scope)
            except RequestError as error:
                headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else None
                shape = _errors_of(route_path(scope), self._endpoints)
                await errors.response(error, headers, shape)(scope, receive, send)
                return
            if scope["path"].endswith("/") and route_path(scope):  # some trainers write routes with a slash at the end
                scope = {**scope, "path": scope["path"].rstrip("/")}
        await self._app(scope, receive, send)


def _with_one_prefix(scope: Scope) -> Scope:
    """The scope of a request with the root path in its path once: the server adds it for a proxy that strips it, and
    another proxy has left it there."""
    root = scope.get("root_path", "").rstrip("/")
    rest: str = scope["path"].removeprefix(root)
    return {**scope, "path": rest} if root and rest.startswith(root + "/") else scope
