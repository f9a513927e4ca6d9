"""Generated bad bodies for each dialect: a 4xx in the dialect's format that names the field, before any work."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.server.site import Site, site
from tests.tiers import slow_after
from tokserve.checkpoint import DEMO_DIR

MESSAGES = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
TENSORS = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
GROUP = {"master_address": "h", "master_port": 29500, "rank_offset": 1, "world_size": 2}
WRONG: dict[str, list[Any]] = {  # by JSON type
    "object": [{"a": [1]}, {"": None}],
    "array": [[{}], [[[]]], [None, 1.5]],
    "string": ["\u0001", "x y"],
    "number": [0.5, -1e308],
    "boolean": [True],
}


@dataclass(frozen=True)
class Door:
    """Routes of one dialect: its server, a body that each route accepts, and a pattern of its errors."""

    options: dict[str, Any]
    bodies: dict[str, dict[str, Any]]
    shape: dict[str, Any]


OPENAI = {"error": {"message": str, "type": str, "param": str, "code": (str, type(None))}}
DOORS = {
    "messages": Door(
        {},
        dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"), MESSAGES),
        {"type": str, "error": {"type": str, "message": str}},
    ),
    "sglang": Door({"sglang_api": True}, {"/generate": {"input_ids": [5]}}, {"error": OPENAI["error"] | {"code": int}}),
    "sglang control": Door(
        {"sglang_api": True},
        {
            "/pause_generation": {},
            "/release_memory_occupation": {},
            "/weights_checker": {},
            "/start_profile": {},
            "/load_lora_adapter": {"lora_name": "a", "lora_path": "/p"},
            "/unload_lora_adapter": {"lora_name": "a"},
            "/update_weights_from_disk": {"model_path": "/w"},
            "/update_weights_from_distributed": TENSORS,
            "/init_weights_update_group": GROUP,
            "/update_weight_version": {"new_version": "7"},
            "/abort_request": {"rid": "a"},
            "/begin_weight_update": {},
            "/end_weight_update": {},
        },
        {"success": bool, "message": str} | OPENAI,
    ),
    "pooling": Door(
        {"runner": "pooling", "model": str(DEMO_DIR)},
        {
            "/v1/embeddings": {"input": "x"},
            "/v2/embed": {"texts": ["x"]},
            "/pooling": {"input": "x"},
            "/score": {"queries": "x", "documents": ["y"]},
            "/rerank": {"query": "x", "documents": ["y"]},
        },
        OPENAI,
    ),
    "beams": Door(
        {},
        {
            "/v1/completions": {"prompt": "x", "use_beam_search": True},
            "/v1/chat/completions": {"messages": MESSAGES["messages"], "use_beam_search": True},
        },
        OPENAI,
    ),
    "profiles": Door({"profiler_dir": "/tmp"}, {"/start_profile": {}}, OPENAI),
}


def kinds(schema: dict[str, Any], schemas: dict[str, Any]) -> set[str]:
    """The JSON types that a schema has room for; all if it does not say."""
    if reference := schema.get("$ref"):
        return kinds(schemas[reference.rpartition("/")[2]], schemas)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return set().union(*(kinds(option, schemas) for option in options))
    if "enum" in schema:
        return {"enum"}
    actual = schema.get("type", [*WRONG])
    return set(actual if isinstance(actual, list) else [actual])


def wrong_values(schema: dict[str, Any], schemas: dict[str, Any]) -> list[Any]:
    """Values of types that the schema has no room for.  Strings stand for numbers and truth in a query, so in a body
    of these routes too; those here stand for none."""
    allowed = kinds(schema, schemas) - {"null"}
    if allowed & {"integer", "number"}:
        allowed |= {"integer", "number", "boolean"}
    return [value for kind, values in WRONG.items() if kind not in allowed for value in values]


def fields(server: Site, path: str) -> Iterator[tuple[str, list[Any]]]:
    """The fields of a route's body, each with wrong values."""
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for name, schema in schemas[body["$ref"].rpartition("/")[2]]["properties"].items():
        if values := wrong_values(schema, schemas):
            yield name, values


def fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return isinstance(value, dict) and set(value) >= set(shape) and all(fits(value[k], shape[k]) for k in shape)
    return isinstance(value, shape)


def named(answer: dict[str, Any]) -> str:
    """What the error says of the field: the field, or the text."""
    error: dict[str, Any] = answer["error"]
    return str(error.get("param") or error["message"])


@pytest.mark.parametrize("bodies", slow_after([100, 1000], 1))
@pytest.mark.parametrize("name", DOORS)
def test_refusals_name_the_field_in_the_format_of_the_route(name: str, bodies: int) -> None:
    door = DOORS[name]
    server = site(**door.options)
    cases = [
        (path, body, field, values) for path, body in door.bodies.items() for field, values in fields(server, path)
    ]
    assert {path for path, *_ in cases} >= {path for path, body in door.bodies.items() if body}
    rng = random.Random(name)
    served = len(server.llm.commands)
    failures = []
    for _ in range(bodies):
        path, body, field, values = rng.choice(cases)
        wrong = rng.choice(values)
        answer = server.post(path, body | {field: wrong})
        reply = answer.json()
        if not 400 <= answer.status_code < 500 or not fits(reply, door.shape) or field not in named(reply):
            failures.append((path, field, wrong, answer.status_code, answer.text[:200]))
    assert not failures, failures[:20]
    assert not server.llm.num_inflight and {verb for verb, _ in server.llm.commands[served:]} <= {
        "ping",
        "stats",
        "status",
    }
