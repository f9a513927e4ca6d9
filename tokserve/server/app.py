"""The HTTP application: the table of routes, the check of API keys, and error responses.

Handlers are functions of (serving, request) that raise `RequestError`s.  These and all other exceptions become error
responses of one form here.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import tokserve
from tokserve.base.errors import LONGEST_SHOWN, NotFound, RequestError, RequestFailed, Unauthorized
from tokserve.base.structs import prepare_structs
from tokserve.client.async_llm import AsyncLLM
from tokserve.config import Config
from tokserve.dialects.anthropic import messages
from tokserve.dialects.anthropic.bodies import CountTokensBody, MessagesBody
from tokserve.dialects.anthropic.error_shape import ANTHROPIC
from tokserve.dialects.anthropic.reply import MessagesReply
from tokserve.dialects.openai import chat, completions, derender, render, responses, schemas, tokenize
from tokserve.dialects.sagemaker import invocations
from tokserve.dialects.sglang import routes as sglang
from tokserve.dialects.trainers import routes as trainers
from tokserve.dialects.trainers import skyrl
from tokserve.features.observe import api_pages, introspection, live_requests, status_page
from tokserve.features.observe.counters import ApiProcess
from tokserve.features.observe.load_header import REPORTED, load_header
from tokserve.features.pooling.routes import classify, cohere, embeddings, rerank, score
from tokserve.features.weights import weight_routes
from tokserve.server import openapi
from tokserve.server import reply_types as types
from tokserve.server.admin import commands, state
from tokserve.server.endpoint import (
    BODY,
    COMMAND,
    ENGINE,
    HTML,
    MISSING,
    NEVER,
    OCTETS,
    POOLING,
    PROMPT,
    TEXT,
    Endpoint,
    Handler,
)
from tokserve.server.http import body, errors
from tokserve.server.http.auth import Keys, route_path
from tokserve.server.http.cors import add_cors
from tokserve.server.http.disconnect import ClientDisconnected
from tokserve.server.http.request_ids import RequestIds
from tokserve.server.serving import GIVEN_ID, PREPARATION, SERVING, Serving, Trace
from tokserve.server.tokens import aborts, generate

logger = logging.getLogger(__name__)

POST, GET = ("POST",), ("GET",)
TOKENS, CHAT = generate.GenerateBody, schemas.ChatBody
WAITED = "X-Waited-For"  # the header of a reply whose request came when no tokens were made: the state
EMBEDDINGS = (embeddings.EmbeddingReply, OCTETS)
ENDPOINTS = (
    Endpoint(
        POST,
        "/inference/v1/generate",
        generate.generate_tokens,
        TOKENS,
        reply=generate.GenerateReply,
        runner="generate",
    ),
    Endpoint(
        POST, "/skyrl/v1/generate", generate.generate_tokens, TOKENS, reply=generate.GenerateReply, runner="generate"
    ),
    *(
        Endpoint(POST, path, aborts.abort_requests, aborts.AbortBody, reply=aborts.AbortReply, raises=BODY)
        for path in ("/inference/v1/abort_requests", "/abort_requests")
    ),
    Endpoint(POST, "/v1/chat/completions", chat.chat, CHAT, text=True, reply=chat.ChatReply, runner="generate"),
    Endpoint(
        POST, "/v1/chat/completions/tokens", chat.chat_tokens, CHAT, text=True, reply=chat.ChatReply, runner="generate"
    ),
    Endpoint(
        POST,
        "/v1/completions",
        completions.completions,
        schemas.CompletionBody,
        reply=completions.CompletionReply,
        runner="generate",
    ),
    Endpoint(
        POST,
        "/v1/embeddings",
        embeddings.embeddings,
        embeddings.EmbeddingBody,
        reply=EMBEDDINGS,
        runner="pooling",
        raises=POOLING,
    ),
    Endpoint(
        POST,
        "/pooling",
        embeddings.vectors,
        embeddings.VectorsBody,
        reply=(embeddings.VectorsReply, OCTETS),
        runner="pooling",
        raises=POOLING,
    ),
    Endpoint(
        POST, "/v2/embed", cohere.embed, cohere.CohereBody, reply=cohere.CohereReply, runner="pooling", raises=POOLING
    ),
    Endpoint(
        POST,
        "/classify",
        classify.classify,
        classify.ClassifyBody,
        reply=classify.ClassifyReply,
        runner="pooling",
        raises=POOLING,
    ),
    *(
        Endpoint(POST, path, score.score, score.ScoreBody, reply=score.ScoreReply, runner="pooling", raises=POOLING)
        for path in score.PATHS
    ),
    *(
        Endpoint(
            POST, path, rerank.rerank, rerank.RerankBody, reply=rerank.RerankReply, runner="pooling", raises=POOLING
        )
        for path in rerank.PATHS
    ),
    Endpoint(
        POST,
        "/v1/responses",
        responses.create,
        schemas.ResponsesBody,
        text=True,
        reply=responses.ResponsesReply,
        runner="generate",
    ),
    Endpoint(("GET", "DELETE"), "/v1/responses/{id}", responses.stored, text=True, raises=MISSING),
    Endpoint(GET, "/v1/responses/{id}/input_items", responses.stored, text=True, raises=MISSING),
    Endpoint(POST, "/v1/responses/{id}/cancel", responses.stored, text=True, raises=MISSING),
    Endpoint(
        POST,
        "/v1/messages",
        messages.create,
        MessagesBody,
        text=True,
        reply=MessagesReply,
        errors=ANTHROPIC,
        runner="generate",
    ),
    Endpoint(
        POST,
        "/v1/messages/count_tokens",
        messages.count_tokens,
        CountTokensBody,
        text=True,
        reply=messages.TokenCount,
        errors=ANTHROPIC,
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/v1/messages/render",
        messages.render,
        MessagesBody,
        text=True,
        reply=render.Rendered,
        errors=ANTHROPIC,
        raises=PROMPT,
    ),
    Endpoint(
        POST, "/v1/chat/completions/render", render.render_chat, CHAT, text=True, reply=render.Rendered, raises=PROMPT
    ),
    Endpoint(
        POST,
        "/v1/completions/render",
        render.render_completions,
        schemas.CompletionBody,
        text=True,
        reply=list[render.Rendered],
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/v1/chat/completions/derender",
        derender.derender_chat,
        derender.DerenderChatBody,
        text=True,
        reply=chat.ChatReply,
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/v1/completions/derender",
        derender.derender_completions,
        derender.DerenderCompletionBody,
        text=True,
        reply=completions.CompletionReply,
        raises=PROMPT,
    ),
    Endpoint(GET, "/tokenizer_info", render.describe, text=True, reply=render.TokenizerDescription),
    Endpoint(
        POST,
        "/tokenize",
        tokenize.tokenize,
        schemas.TokenizeBody,
        text=True,
        reply=tokenize.TokenizeReply,
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/detokenize",
        tokenize.detokenize,
        schemas.DetokenizeBody,
        text=True,
        reply=tokenize.DetokenizeReply,
        raises=PROMPT,
    ),
    Endpoint(GET, "/v1/models", introspection.models, reply=introspection.ModelList),
    Endpoint(GET, "/v1/models/{id:path}", introspection.model, reply=introspection.ModelCard, raises=ENGINE | MISSING),
    Endpoint(GET, "/health", introspection.health, reply=types.EmptyObject, query=(("deep", bool),)),
    Endpoint(("GET", "POST"), "/ping", introspection.health, reply=types.EmptyObject, query=(("deep", bool),)),
    Endpoint(POST, "/invocations", invocations.invocations, invocations.InvocationBody, reply=types.JsonObject),
    Endpoint(
        GET, "/ready", introspection.readiness, reply=introspection.Readiness, also=((503, introspection.Readiness),)
    ),
    Endpoint(GET, "/version", introspection.version, reply=types.Version, raises=NEVER),
    Endpoint(GET, "/metrics", introspection.prometheus_metrics, reply=TEXT, guarded=True),
    Endpoint(GET, "/load", introspection.load, reply=types.ServerLoad, guarded=True),
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
    Endpoint(GET, "/liveness", state.liveness, reply=types.EmptyObject),
    Endpoint(GET, "/inference/v1/state", state.state, reply=types.ServerState, guarded=True),
    Endpoint(GET, "/kv_event_sources", state.kv_event_sources, reply=list[types.JsonObject], guarded=True),
    Endpoint(GET, "/is_paused", state.is_paused, reply=types.IsPaused, guarded=True),
    Endpoint(GET, "/is_sleeping", state.is_sleeping, reply=types.IsSleeping, guarded=True),
    Endpoint(
        GET,
        "/weight_info",
        weight_routes.served_weights,
        reply=types.ServedWeights,
        guarded=True,
        raises=COMMAND,
        query=(("checksum", bool), ("tensors", bool)),
    ),
    Endpoint(GET, "/get_world_size", state.get_world_size, reply=types.WorldSize, query=(("include_dp", bool),)),
    *(
        Endpoint(POST, path, handler, kind, control=True, reply=reply)
        for path, handler, kind, reply in (
            *commands.routes(collective_rpc=skyrl.collective_rpc),
            ("/update_weights", weight_routes.update_weights, weight_routes.UpdateBody, types.Done),
            ("/weight_checker", weight_routes.weight_checker, weight_routes.CheckerBody, types.Checksums),
            *trainers.ROUTES,
        )
    ),
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
CONTROL = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.control)
SGLANG_PATHS = frozenset(endpoint.path for endpoint in sglang.ENDPOINTS)


def endpoints(config: Config) -> tuple[Endpoint, ...]:
    """The routes of a server; with `sglang_api`, SGLang's take the place of those with the same path."""
    if not config.server.sglang_api:
        return ENDPOINTS
    return (*(endpoint for endpoint in ENDPOINTS if endpoint.path not in SGLANG_PATHS), *sglang.ENDPOINTS)


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
            names = None if serving.config.lora.enable_lora else serving.names
            served = [endpoint for endpoint in endpoints(serving.config) if endpoint.is_served(serving.config)]
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
    if serving.text and llm.tokenizer is not None:
        _ = serving.tool_format, serving.thinking  # raises StartError now instead of at the first request
        if serving.template.sources is None:
            logger.warning("the model has no chat template: chat is refused; --chat-template gives one")
    table = endpoints(config)
    for endpoint in table:
        app.router.routes += _routes(endpoint, endpoint.text and not serving.text, endpoint.is_served(config))
    server = config.server
    hosts = server.allowed_hosts
    keys = Keys(
        server.api_key or [],
        server.admin_api_key or [],
        remote_control=server.allow_remote_control,
        control=frozenset(endpoint.path for endpoint in table if endpoint.control),
        hosts=None if hosts is None or "*" in hosts else hosts,
        guarded=frozenset(endpoint.path for endpoint in table if endpoint.guarded),
    )
    app.add_middleware(Guard, keys=keys, endpoints=table)
    app.add_middleware(RequestIds, makes_ids=config.replies.enable_request_id_headers)
    add_cors(app, config.cors)
    app.add_exception_handler(HTTPException, _http_error)
    prepare_structs()
    return app


@cache
def _routes(endpoint: Endpoint, refuses: bool, is_served: bool) -> tuple[Route, ...]:
    """A route for each method, as FastAPI's document has an operation for each; HEAD goes with GET.  They hold nothing
    of a server: a process makes them once, however many applications it has."""
    handler = _with_error_responses(introspection.refuse_text_route if refuses else endpoint.handler, endpoint)
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
            if endpoint.runner and (load := load_header(request, serving.llm)):
                response.headers[REPORTED] = load
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
    table = endpoints(request.app.state.serving.config)
    path, shape = request.url.path[:LONGEST_SHOWN], _errors_of(request.url.path, table)
    if error.status_code == 404:
        whole = request.url.path.rstrip("/")
        suggestion = suggest_route(whole)
        hint = f"; did you mean {suggestion}?" if suggestion else ""
        if whole in SGLANG_PATHS:
            hint = "; SGLang's routes need --sglang-api"
        return errors.response(NotFound(f"there is no route {path}{hint}", code="unknown_route"), None, shape)
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


def suggest_route(path: str) -> str | None:
    """The shortest route that ends with `path`, or with which `path` ends: base URLs lack /v1, or have it twice.  Else
    one that is written nearly so."""
    routes = [endpoint.path for endpoint in ENDPOINTS if not endpoint.path.startswith("/skyrl/")]  # others' names
    candidates = [route for route in routes if path and (route.endswith(path) or path.endswith(route))]
    candidates = candidates or difflib.get_close_matches(path[:LONGEST_SHOWN], routes, 1, cutoff=0.85)
    return min(candidates, key=len, default=None)


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
