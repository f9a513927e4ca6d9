"""What FastAPI is told of each route, and the schemas of /openapi.json: of msgspec structs and pydantic models.

Types come from the structs and models, and ranges of parameters and options from `params`.  Checks of the routes beyond
these are repeated in the tables below, so that generated clients (and fuzzers) make bodies that are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel

from tokserve.base.rooms import contributions
from tokserve.protocol.params import SamplingParams
from tokserve.server import descriptions
from tokserve.server.endpoint import Content, Endpoint
from tokserve.server.http import declared
from tokserve.server.http.body import JSON, MAX_ID, MSGPACK

_REF = "#/components/schemas/{name}"
JsonSchema = dict[str, Any]

IDS: JsonSchema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
# limits by field, for the branch of its schema that has the type
NUMBERS: dict[str, JsonSchema] = declared.limits(int, float)
NUMBERS["max_tokens"] |= {"minimum": 1}  # 0 where a prompt can be scored
NUMBERS |= {
    "max_completion_tokens": NUMBERS["max_tokens"],
    "max_output_tokens": NUMBERS["max_tokens"],
    "top_logprobs": NUMBERS["logprobs"],
}
OTHERS: dict[str, JsonSchema] = declared.limits(str, list[int]) | {
    "request_id": {"pattern": f"^[ -~]{{1,{MAX_ID}}}$"},
    "token_ids": IDS,
    "tokens": IDS,
    "messages": {
        "minItems": 1,
        "items": {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]},
    },
    "logit_bias": {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}},
}
OTHERS |= {name: IDS | OTHERS[name] for name in ("allowed_token_ids", "logprob_token_ids")}
TAGS = [{"name": name, "description": text} for name, text in descriptions.TAGS]
OBJECTS = ("kv_transfer_params",)
EVENT: JsonSchema = {
    "type": "object",
    "description": "Each event: its data is JSON, or [DONE] at the end.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def document(described: dict[str, Any], endpoints: Iterable[Endpoint], models: Sequence[str] | None) -> dict[str, Any]:
    """FastAPI's document of the routes, with the schemas that they refer to.  `models`: the names that the server
    answers to; None: they change while it serves."""
    endpoints = list(endpoints)
    components = _components(endpoints, models)
    bodies = {endpoint.body.__name__ for endpoint in endpoints if endpoint.body is not None}
    for name in (bodies | {"SamplingParams", "StructuredOutputs"}) & components.keys():
        _describe(name, components[name])
    return described | {"components": {"schemas": components}}


def route_options(endpoint: Endpoint, method: str) -> dict[str, Any]:
    """What FastAPI is told of a route, for its document; bodies and replies are read and made by the handler."""
    path = endpoint.path.replace(":path}", "}")
    parameters: list[JsonSchema] = []
    if "{" in path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    parameters += [{"name": name, "in": "query", "schema": _schema(kind)} for name, kind in endpoint.query]
    extra: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if endpoint.body is not None and method != "GET":
        about = "The same fields are taken as application/msgpack."
        content = {JSON: {"schema": _schema(endpoint.body)}}
        if path in descriptions.EXAMPLES_OF_ROUTES:
            content[JSON]["example"] = descriptions.EXAMPLES_OF_ROUTES[path]
        extra["requestBody"] = {"required": not endpoint.control, "description": about, "content": content}
    return {
        "tags": [endpoint.handler.__module__.split(".")[2]],
        "summary": endpoint.summary or path,
        "operation_id": f"{method.lower()}{path}".replace("/", "_"),
        "responses": _responses(endpoint),
        "openapi_extra": extra,
    }


def _responses(endpoint: Endpoint) -> dict[int | str, dict[str, Any]]:
    error = _content([endpoint.errors.struct])
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": descriptions.STATUSES[status], "content": error} for status in endpoint.statuses
    }
    for status, reply in endpoint.also:
        known = [endpoint.errors.struct] if status in endpoint.statuses else []
        responses[status] = {"description": descriptions.STATUSES[status], "content": _content([*known, reply])}
    if endpoint.replies:
        content = _content(endpoint.replies)
        if JSON in content and endpoint.msgpack:
            content[MSGPACK] = content[JSON]
        if endpoint.streams:
            content["text/event-stream"] = {"schema": EVENT}
        responses[200] = {"description": "OK"} | ({"content": content} if content else {})
    return dict(sorted(responses.items(), key=lambda entry: int(entry[0])))


def _content(replies: Iterable[Any]) -> dict[str, Any]:
    """The forms of a reply by media type."""
    replies = list(replies)
    schemas = [_schema(reply) for reply in replies if not isinstance(reply, Content)]
    content: dict[str, Any] = {
        reply.media: {"schema": {"type": "string"}} for reply in replies if isinstance(reply, Content) and reply.media
    }
    if schemas:
        content[JSON] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    return content


@cache
def _schema(kind: Any) -> JsonSchema:
    """The schema of a type; of structs and models a reference."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {"$ref": _REF.format(name=kind.__name__)}
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


def _components(endpoints: list[Endpoint], models: Sequence[str] | None) -> dict[str, Any]:
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    models_of_bodies = [body for body in bodies if issubclass(body, BaseModel)]
    types: list[Any] = [body for body in bodies if issubclass(body, msgspec.Struct)]
    for endpoint in endpoints:
        replies = (*endpoint.replies, *(reply for _, reply in endpoint.also))
        types += [endpoint.errors.struct, *(reply for reply in replies if not isinstance(reply, Content))]
    _, components = msgspec.json.schema_components([*types, SamplingParams], ref_template=_REF)
    for model in models_of_bodies:
        described = model.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(described.pop("$defs", {}))
        components[model.__name__] = described
    sampling = components["SamplingParams"]["properties"]
    for name, field in sampling.items():  # null is the default of every parameter
        if not branch(field, "null"):
            sampling[name] = {"anyOf": [field, {"type": "null"}], "default": field["default"]}
    for name in {body.__name__ for body in bodies if "body" in body.__name__.lower()} | {"SamplingParams"}:
        _narrow(components[name], models)
    if "GenerateBody" in components:  # Raw in the struct
        sampling_params: JsonSchema = {
            "anyOf": [{"$ref": _REF.format(name="SamplingParams")}, {"type": "null"}],
            "default": {},
        }
        components["GenerateBody"]["properties"]["sampling_params"] = sampling_params
        components["GenerateBody"]["anyOf"] = [{"required": ["token_ids"]}, {"required": ["token_ids_b64"]}]
    branch(sampling["max_tokens"], "integer")["minimum"] = 0  # a prompt can be scored
    for _, narrow in contributions("schemas"):
        narrow(components, models)
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
        elif name in OBJECTS:
            component["properties"][name] = {"anyOf": [{"type": "object"}, {"type": "null"}], "default": None}
        elif name in NUMBERS:
            for kind in ("integer", "number"):
                branch(field, kind).update(NUMBERS[name])
        elif name in OTHERS:
            for kind in ("string", "array", "object"):
                branch(field, kind).update(OTHERS[name])


def branch(field: JsonSchema, kind: str) -> JsonSchema:
    """The part of a field's schema that has the type `kind`, or else an empty schema that is not part of it."""
    return next((part for part in field.get("anyOf", [field]) if part.get("type") == kind), {})
