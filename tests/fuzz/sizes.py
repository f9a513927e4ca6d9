"""Every field of every POST route that can hold a text, a list or an object, at sizes that no client has, and every
field nested deeper than any client nests it.

The fields are read from the bodies' own types, so a new field is covered without a word here; what makes a value of
that type that is worth sending is below.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel

from tests.route_table import ENDPOINTS
from tokserve.dialects.sglang.generate import SglangGenerateBody
from tokserve.dialects.sglang.sampling import SglangSamplingParams
from tokserve.protocol.params import SamplingParams, StructuredOutputs
from tokserve.server.compat import SGLANG
from tokserve.server.endpoint import Endpoint
from tokserve.server.tokens.generate_body import GenerateBody

SIZES = (100, 10_000, 1_000_000)
DEPTHS = (
    100,
    200,
    300,
    400,
    500,
    600,
    700,
    800,
    900,
    940,
    980,
    10_000,
    1_000_000,
)  # about the interpreter's limit, 1000
MESSAGE = {"role": "user", "content": "x"}
CHOICE = {"index": 0, "token_ids": [5], "finish_reason": "length"}
# what a body needs besides the field
LEAST: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [MESSAGE], "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": [MESSAGE]},
    "/v1/chat/completions/tokens": {"tokens": [5], "messages": [MESSAGE], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/tokenize": {},
    "/detokenize": {},
    "/v1/chat/completions/derender": {"generate_response": {"choices": [CHOICE], "prompt_token_ids": [5]}},
    "/v1/completions/derender": {"generate_responses": [{"choices": [CHOICE], "prompt_token_ids": [5]}]},
    "/v1/messages": {"model": "demo", "messages": [MESSAGE], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "demo", "messages": [MESSAGE]},
    "/v1/messages/render": {"model": "demo", "messages": [MESSAGE], "max_tokens": 1},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/collective_rpc": {"method": "a"},
    "/weight_checker": {"action": "compare"},
    "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
    "/weights_checker": {"action": "compare"},
    "/update_weights_from_disk": {"model_path": "a"},
}
# entries of lists that have a meaning of their own, by field
ENTRIES: dict[str, Any] = {
    "messages": MESSAGE,
    "input": {"type": "message", **MESSAGE},
    "documents": {"title": "a", "text": "b"},
    "include": "reasoning.encrypted_content",
    "prompt": "a",
    "generate_responses": {"choices": [CHOICE]},
}
SCHEMA_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
# parts of bodies that are read where they are needed, not with the body
CHAT_NESTED = (
    "messages.0.content",
    "messages.0.tool_calls",
    "tools.0.function.parameters",
    "response_format.json_schema.schema",
    "structured_outputs.json",
)
MESSAGES_NESTED = ("messages.0.content", "system", "tools.0.input_schema", "output_config.format.schema")
NESTED: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": CHAT_NESTED,
    "/v1/chat/completions/tokens": CHAT_NESTED,
    "/v1/chat/completions/render": CHAT_NESTED,
    "/v1/messages": MESSAGES_NESTED,
    "/v1/messages/render": MESSAGES_NESTED,
    "/v1/messages/count_tokens": MESSAGES_NESTED,
    "/v1/responses": ("input.0.content", "tools.0.parameters", "text.format.schema"),
    "/v1/completions": ("structured_outputs.json", "response_format.json_schema.schema"),
    "/generate": ("sampling_params.json_schema", "sampling_params.custom_params", *SGLANG),
}
# what must be there around them
AROUND: dict[str, Any] = {
    "messages": [MESSAGE],
    "tools": [SCHEMA_TOOL | {"name": "f", "input_schema": {}, "parameters": {}}],
    "response_format": FORM,
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "input": [{"type": "message", **MESSAGE}],
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
}
SKIPPED = frozenset(
    {  # these change the server for the cases that follow
        "/pause",
        "/sleep",
        "/start_weight_update",
        "/update_weight_version",
        "/areal_pause_generation",
        "/pause_generation",
        "/release_memory_occupation",
        "/begin_weight_update",
        "/init_weights_update_group",  # waits for the group's other members
    }
)


class Case(NamedTuple):
    """A body with one large field; `field` is its path."""

    path: str
    field: str
    body: bytes


def cases(size: int, endpoints: Sequence[Endpoint] = ENDPOINTS) -> Iterator[Case]:
    """All fields of all routes at a size, in entries of lists and objects and in bytes of texts."""
    for endpoint in _posts(endpoints):
        for field, value in _fields(endpoint, size):
            yield Case(endpoint.path, field, json.dumps(_body(endpoint.path, field, value)).encode())


def deep_cases(depth: int, endpoints: Sequence[Endpoint] = ENDPOINTS) -> Iterator[Case]:
    """All fields of all routes with lists in lists, and with objects in objects."""
    lists = b"[" * depth + b"]" * depth
    objects = b'{"a":' * depth + b"1" + b"}" * depth
    for endpoint in _posts(endpoints):
        paths = {field for field, _ in _fields(endpoint, 1)} | {"unknown"}
        for field in sorted(paths | set(NESTED.get(endpoint.path, ()))):
            body = json.dumps(_body(endpoint.path, field, "HERE")).encode()
            for value in (lists, objects):
                yield Case(endpoint.path, field, body.replace(b'"HERE"', value))


def _posts(endpoints: Sequence[Endpoint]) -> Iterator[Endpoint]:
    for endpoint in endpoints:
        if "POST" in endpoint.methods and endpoint.body is not None and endpoint.path not in SKIPPED:
            yield endpoint


def _body(path: str, field: str, value: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(LEAST.get(path, {})))
    inside = body
    *parents, name = field.split(".")
    if parents and parents[0] in AROUND:
        body[parents[0]] = json.loads(json.dumps(AROUND[parents[0]]))
    for parent in parents:
        inside = inside.setdefault(parent, {}) if isinstance(inside, dict) else inside[int(parent)]
    inside[name if isinstance(inside, dict) else int(name)] = value
    return body


def _fields(endpoint: Endpoint, size: int) -> Iterator[tuple[str, Any]]:
    for name, hint in _hints(endpoint.body).items():
        for value in _values(name, hint, size):
            yield name, value
    if endpoint.body is GenerateBody:
        for prefix, kind in (
            ("sampling_params", SamplingParams),
            ("sampling_params.structured_outputs", StructuredOutputs),
        ):
            for name, hint in _hints(kind).items():
                for value in _values(name, hint, size):
                    yield f"{prefix}.{name}", value
    if endpoint.body is SglangGenerateBody:
        for name, hint in _hints(SglangSamplingParams).items():
            for value in _values(name, hint, size):
                yield f"sampling_params.{name}", value
        yield "input_ids", [[5]] * size
    if "messages" in _hints(endpoint.body):
        yield "messages", [{"role": "user", "content": [{"type": "text", "text": "x"}] * size}]
        yield "messages", [{"role": "x" * size, "content": "x"}]
    yield "unknown", ["x"] * size


def _hints(kind: Any) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    assert issubclass(kind, msgspec.Struct)
    hints = get_type_hints(kind, include_extras=False)
    return {
        name: hints[attribute]
        for attribute, name in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    }


def _values(name: str, hint: Any, size: int) -> Iterator[Any]:
    """Large values of a type, for each form that it may have."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        for arm in get_args(hint):
            yield from _values(name, arm, size)
        return
    origin = get_origin(hint) or hint
    if origin in (str, bytes):
        yield "x" * size
    elif origin is list:
        yield [ENTRIES.get(name, _entry(get_args(hint)))] * size
    elif origin is dict:
        yield {str(i): "x" for i in range(size)}
    elif hint is Any:
        yield "x" * size
        yield [ENTRIES.get(name, 5)] * size


def _entry(args: tuple[Any, ...]) -> Any:
    hint = args[0] if args else Any
    origin = get_origin(hint) or hint
    return {int: 5, str: "x", list: [5, 6], dict: {"a": 1}, float: 0.5}.get(origin, {})
