"""Makes /openapi.json from the table of routes; bodies are msgspec structs or pydantic models.

Types come from the structs and models, and ranges of parameters and options from `params`.  Checks of the routes beyond
these are repeated in the tables below, so that generated clients (and fuzzers) make bodies that are accepted.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tokserve.params import SamplingParams
from tokserve.server import descriptions
from tokserve.server.http import declared
from tokserve.server.http.body import MAX_ID
from tokserve.server.http.errors import OPENAI, ErrorShape
from tokserve.server.openai.tools import MAX_CALLS
from tokserve.server.serving import Serving

_REF = "#/components/schemas/{name}"
JsonSchema = dict[str, Any]

IDS: JsonSchema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# limits by field, for the branch of its schema that has the type
NUMBERS: dict[str, JsonSchema] = declared.limits(int, float)
NUMBERS |= {
    "max_completion_tokens": NUMBERS["max_tokens"], "max_output_tokens": NUMBERS["max_tokens"],
    "top_logprobs": NUMBERS["logprobs"], "max_tool_calls": {"minimum": 1, "maximum": MAX_CALLS},
}  # fmt: skip
OTHERS: dict[str, JsonSchema] = declared.limits(str, list[int]) | {
    "request_id": {"pattern": f"^[ -~]{{1,{MAX_ID}}}$"}, "token_ids": IDS, "tokens": IDS, "messages": {
        "minItems": 1, "items": {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]},
    },
    "logit_bias": {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}},
}  # fmt: skip
OTHERS |= {name: IDS | OTHERS[name] for name in ("allowed_token_ids", "logprob_token_ids")}
PROMPT: JsonSchema = {"anyOf": [{"type": "string", "minLength": 1}, IDS, {"type": "array", "minItems": 1, "items": {
    "anyOf": [{"type": "string", "minLength": 1}, IDS]}}]}  # fmt: skip
ONE_OF_REQUIRED = {
    "GenerateBody": ("token_ids", "token_ids_b64"),
    "ChatBody": ("messages", "tokens"),
    "CompletionBody": ("prompt",),
    "ResponsesBody": ("input",),
}
# of Anthropic's routes: their conversation, with the contents that need nothing else, and a model that must be named
CONVERSATIONS = ("MessagesBody", "CountTokensBody")
TURNS: JsonSchema = {"type": "array", "minItems": 1, "items": {
    "type": "object", "required": ["role", "content"], "properties": {
        "role": {"enum": ["user", "assistant", "system"]}, "content": {"anyOf": [{"type": "string"}, {
            "type": "array", "items": {"type": "object", "required": ["type"], "properties": {
                "type": {"type": "string"}}}}]}}}}  # fmt: skip
ONLY_NULL = ("kv_transfer_params",)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route: its handler, and the types of its body and reply.

    `text`: needs a tokenizer.  `control`: a control route, for which `auth` has rules of its own.  `errors`: the shape
    of its errors.
    """

    methods: tuple[str, ...]
    path: str
    handler: Callable[[Serving, Request], Awaitable[Response]]
    body: type[msgspec.Struct] | type[BaseModel] | None = None
    text: bool = False
    reply: type[msgspec.Struct] | None = None
    control: bool = False
    errors: ErrorShape = OPENAI


def schema(endpoints: Iterable[Endpoint], version: str, models: Sequence[str] | None) -> dict[str, Any]:
    """The OpenAPI document.  `models`: the names that the server answers to; None: they change while it serves."""
    endpoints = list(endpoints)
    types = [
        kind
        for endpoint in endpoints
        for kind in (endpoint.body, endpoint.reply, endpoint.errors.struct)
        if kind is not None
    ]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        for method in endpoint.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(endpoint, method, path)
    components = _components(types, models)
    bodies = {endpoint.body.__name__ for endpoint in endpoints if endpoint.body is not None}
    for name in bodies | {"SamplingParams", "StructuredOutputs"}:
        _describe(name, components[name])
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokserve", "version": version},
        "tags": [{"name": name, "description": text} for name, text in descriptions.TAGS],
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(endpoint: Endpoint, method: str, path: str) -> dict[str, Any]:
    error = {"description": "Error", "content": _content(endpoint.errors.struct)}
    operation: dict[str, Any] = {
        "tags": [endpoint.handler.__module__.split(".")[2]],
        "summary": _summary(endpoint) or path,
        "operationId": f"{method.lower()}{path}".replace("/", "_"),
        "responses": {"200": _answer(endpoint), "4XX": error, "5XX": error},
    }
    if "{" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.body is not None:
        about = "The same fields are taken as application/msgpack."
        operation["requestBody"] = {"required": True, "description": about, "content": _content(endpoint.body)}
    return operation


def _summary(endpoint: Endpoint) -> str:
    """What a handler's docstring says after the route."""
    line = (inspect.getdoc(endpoint.handler) or "").partition("\n")[0]
    return line.partition(": ")[2] or line


def _answer(endpoint: Endpoint) -> JsonSchema:
    if endpoint.reply is None:
        return {"description": "OK"}
    body = endpoint.body
    streams = body is not None and issubclass(body, msgspec.Struct) and "stream" in body.__struct_fields__
    content = _content(endpoint.reply) | ({"text/event-stream": {"schema": {"type": "string"}}} if streams else {})
    return {"description": "OK", "content": content}


def _content(body: type[Any]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}


def _components(types: Iterable[type[Any]], models: Sequence[str] | None) -> dict[str, Any]:
    types = list(types)
    structs = [kind for kind in types if issubclass(kind, msgspec.Struct)]
    _, components = msgspec.json.schema_components([*structs, SamplingParams], ref_template=_REF)
    for model in types:
        if issubclass(model, BaseModel):
            described = model.model_json_schema(ref_template="#/components/schemas/{model}")
            components.update(described.pop("$defs", {}))
            components[model.__name__] = described
    sampling = components["SamplingParams"]["properties"]
    for name, field in sampling.items():  # null is the default of every parameter
        sampling[name] = field if _or_null(field) else {"anyOf": [field, {"type": "null"}], "default": field["default"]}
    for name in {kind.__name__ for kind in types if "body" in kind.__name__.lower()} | {"SamplingParams"}:
        _narrow(components[name], models)
    for name, needed in ONE_OF_REQUIRED.items():
        if name in components:
            components[name]["anyOf"] = [{"required": [field]} for field in needed]
    for name in CONVERSATIONS:
        if name in components:
            components[name]["properties"] |= {
                "messages": TURNS,
                "model": {"type": "string", "minLength": 1} if models is None else {"enum": list(models)},
            }
            components[name]["required"] = ["model", *components[name]["required"]]
    if "GenerateBody" in components:  # Raw in the struct
        sampling_params: JsonSchema = {
            "anyOf": [{"$ref": _REF.format(name="SamplingParams")}, {"type": "null"}],
            "default": {},
        }
        components["GenerateBody"]["properties"]["sampling_params"] = sampling_params
    if "CompletionBody" in components:
        fields = components["CompletionBody"]["properties"]
        fields["prompt"] = PROMPT
        for name in ("max_tokens", "max_completion_tokens"):
            _branch(fields[name], "integer")["minimum"] = 0
    return components


def _describe(name: str, component: JsonSchema) -> None:
    for field, schema in component.get("properties", {}).items():
        if field in descriptions.FIELDS:
            component["properties"][field] = schema | {"description": descriptions.FIELDS[field]}
    if name in descriptions.EXAMPLES:
        component["examples"] = [descriptions.EXAMPLES[name]]


def _narrow(component: JsonSchema, models: Sequence[str] | None) -> None:
    for name, field in component["properties"].items():
        if name == "model" and models is not None:
            component["properties"][name] = {"enum": [*models, None], "default": None}
        elif name in ONLY_NULL:
            component["properties"][name] = {"type": "null", "default": None}
        elif name in NUMBERS:
            for kind in ("integer", "number"):
                _branch(field, kind).update(NUMBERS[name])
        elif name in OTHERS:
            for kind in ("string", "array", "object"):
                _branch(field, kind).update(OTHERS[name])


def _branch(field: JsonSchema, kind: str) -> JsonSchema:
    """The part of a field's schema that has the type `kind`, or else an empty schema that is not part of it."""
    return next((part for part in field.get("anyOf", [field]) if part.get("type") == kind), {})


def _or_null(field: JsonSchema) -> bool:
    return "type" in _branch(field, "null")
