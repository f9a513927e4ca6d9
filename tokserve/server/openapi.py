"""/openapi.json from the table of routes: the bodies are msgspec structs or pydantic models, described alike."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tokserve.params import SamplingParams
from tokserve.server.errors import ErrorBody
from tokserve.server.serving import Serving

_REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route: its handler, the type of its body, and whether it needs a tokenizer."""

    methods: tuple[str, ...]
    path: str
    handler: Callable[[Serving, Request], Awaitable[Response]]
    body: type[msgspec.Struct] | type[BaseModel] | None = None
    text: bool = False


def schema(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    endpoints = list(endpoints)
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        for method in endpoint.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(endpoint, method, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokserve", "version": version},
        "paths": paths,
        "components": {"schemas": _components(bodies)},
    }


def _operation(endpoint: Endpoint, method: str, path: str) -> dict[str, Any]:
    error = {"description": "Error", "content": _content(ErrorBody)}
    made: dict[str, Any] = {
        "summary": (inspect.getdoc(endpoint.handler) or path).partition("\n")[0],
        "operationId": f"{method.lower()}{path}".replace("/", "_"),
        "responses": {"200": {"description": "OK"}, "4XX": error, "5XX": error},
    }
    if "{" in path:
        made["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.body is not None:
        made["requestBody"] = {"required": True, "content": _content(endpoint.body)}
    return made


def _content(body: type[Any]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}


def _components(bodies: Iterable[type[Any]]) -> dict[str, Any]:
    structs = [body for body in bodies if issubclass(body, msgspec.Struct)]
    _, components = msgspec.json.schema_components([*structs, SamplingParams, ErrorBody], ref_template=_REF)
    generate = components.get("GenerateBody")
    if generate is not None:  # decoded by itself, so its type does not show in the struct
        generate["properties"]["sampling_params"] = {"$ref": _REF.format(name="SamplingParams")}
    for model in bodies:
        if issubclass(model, BaseModel):
            described = model.model_json_schema(ref_template="#/components/schemas/{model}")
            components.update(described.pop("$defs", {}))
            components[model.__name__] = described
    return components
