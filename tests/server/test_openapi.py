"""/openapi.json describes the server: its limits are those that are checked, its names those that are accepted."""

import json
from typing import Any

import pytest

from tests.server.site import Site, site
from tokserve.checkpoint import DEMO_DIR
from tokserve.protocol.params import SamplingParams
from tokserve.server.descriptions import EXAMPLES, FIELDS, STATUSES, TAGS
from tokserve.server.http.auth import PUBLIC
from tokserve.server.openapi import NUMBERS
from tokserve.server.routes import endpoints

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
PROMPTS = {
    GENERATE: {"token_ids": [5]},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    COMPLETIONS: {"prompt": "x", "echo": True},
    RESPONSES: {"input": "x", "include": ["message.output_text.logprobs"]},
}
POOLING = {"runner": "pooling", "model": str(DEMO_DIR)}
OPTIONS: list[dict[str, Any]] = [{}, {"tokens_only": True}, POOLING, {"sglang_api": True}, {"ui": True}]
BODIES = {GENERATE: "GenerateBody", CHAT: "ChatBody", COMPLETIONS: "CompletionBody", RESPONSES: "ResponsesBody"}


@pytest.fixture(scope="module")
def server() -> Site:
    return site()


@pytest.fixture(scope="module")
def schemas(server: Site) -> dict[str, Any]:
    actual: dict[str, Any] = server.get("/openapi.json").json()["components"]["schemas"]
    return actual


def beyond(part: dict[str, Any]) -> list[Any]:
    """Numbers just outside the limits of a schema."""
    step = 1 if part["type"] == "integer" else 1e-6
    numbers = [part["minimum"] - step] if "minimum" in part else []
    numbers += [part["exclusiveMinimum"]] if "exclusiveMinimum" in part else []
    return numbers + ([part["maximum"] + step] if "maximum" in part else [])


def numbers(component: dict[str, Any]) -> list[tuple[str, Any]]:
    """(field, number that is refused) of a component."""
    parts = [(name, part) for name, field in component["properties"].items() for part in field.get("anyOf", [field])]
    inside = {(name, part["const"]) for name, part in parts if "const" in part}
    cases = [
        (name, value) for name, part in parts if part.get("type") in ("integer", "number") for value in beyond(part)
    ]
    return [case for case in cases if case not in inside]


@pytest.mark.parametrize("route", PROMPTS)
def test_what_is_outside_a_limit_is_refused_by_name(server: Site, schemas: dict[str, Any], route: str) -> None:
    cases = numbers(schemas[BODIES[route]])
    assert cases
    for name, value in cases:
        answer = server.post(route, PROMPTS[route] | {name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, (name, value, answer.text)


def test_what_is_outside_a_limit_of_the_parameters_is_refused(server: Site, schemas: dict[str, Any]) -> None:
    cases = numbers(schemas["SamplingParams"])
    assert {name for name, _ in cases} == set(NUMBERS) & set(SamplingParams.__struct_fields__)
    for name, value in cases:
        answer = server.post(GENERATE, PROMPTS[GENERATE] | {"sampling_params": {name: value}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == f"sampling_params.{name}", answer.text


def test_no_limit_of_the_output_is_inside(server: Site, schemas: dict[str, Any]) -> None:
    fields = {"ChatBody": "max_tokens", "CompletionBody": "max_completion_tokens", "ResponsesBody": "max_output_tokens"}
    for name, field in fields.items():
        assert {"const": -1} in schemas[name]["properties"][field]["anyOf"]
        route = next(path for path, body in BODIES.items() if body == name)
        assert server.post(route, PROMPTS[route] | {field: -1}).status_code == 200
    assert {"const": -1} not in schemas["MessagesBody"]["properties"]["max_tokens"].get("anyOf", [])


def test_the_limits_themselves_are_inside() -> None:
    for name in set(NUMBERS) & set(SamplingParams.__struct_fields__):
        for limit in ("minimum", "maximum"):
            if limit in NUMBERS[name]:
                SamplingParams(**{"min_tokens": 0, name: NUMBERS[name][limit]}).validate()


def test_the_fields_are_those_of_the_routes(schemas: dict[str, Any]) -> None:
    assert set(schemas["SamplingParams"]["properties"]) == set(SamplingParams.__struct_fields__)
    assert schemas["GenerateBody"]["properties"]["model"]["enum"] == ["tiny", "alias", None]
    assert schemas["GenerateBody"]["properties"]["kv_transfer_params"]["anyOf"][0] == {"type": "object"}
    for field in schemas["SamplingParams"]["properties"].values():
        assert {"type": "null"} in field["anyOf"]


def test_replies_of_the_token_routes_are_described(server: Site, schemas: dict[str, Any]) -> None:
    described = server.get("/openapi.json").json()["paths"]
    content = described[GENERATE]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "application/msgpack", "text/event-stream"}
    reply = server.post(GENERATE, PROMPTS[GENERATE] | {"sampling_params": {"max_tokens": 2}}).json()
    reply_schema, choice_schema = schemas["GenerateReply"], schemas["GenerateChoice"]
    assert set(reply_schema["required"]) <= set(reply) <= set(reply_schema["properties"])
    assert set(choice_schema["required"]) <= set(reply["choices"][0]) <= set(choice_schema["properties"])


@pytest.mark.some(3)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_the_document_is_of_the_routes_that_are_served(options: dict[str, Any]) -> None:
    running = site(**options)
    described = running.get("/openapi.json").json()
    for part in json.dumps(described).split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in described["components"]["schemas"]
    served = {e.path.replace(":path", "") for e in endpoints(running.llm.config) if e.is_served(running.llm.config)}
    assert served == set(described["paths"])
    assert ("/v1/chat/completions" in served) is not ({"tokens_only", "runner"} & options.keys() != set())
    if "tokens_only" in options:
        rooms = {
            (operation["tags"][0], path) for path, item in described["paths"].items() for operation in item.values()
        }
        openai = {path for room, path in rooms if room in ("openai", "anthropic")}
        assert openai == {"/v1/completions"}, "with ids only"
    assert ("/v1/embeddings" in served) is ("runner" in options) and ("/docs" in served) is ("ui" in options)


def test_every_route_documents_what_it_can_answer(server: Site) -> None:
    described = server.get("/openapi.json").json()["paths"]
    for path, operations in described.items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            assert "500" in statuses and statuses <= set(map(str, STATUSES)) | {"200"}, (method, path)
            assert ("401" in statuses) is (path.rstrip("/") not in PUBLIC), (method, path)
            assert operation["tags"][0] in dict(TAGS) and operation["summary"], (method, path)
    replies = described["/v1/responses/{id}"]["get"]["responses"]
    assert set(replies) == {"401", "404", "500"}, "this route always refuses"
    assert {"404", "409", "413", "429", "503"} <= set(described[GENERATE]["post"]["responses"])
    assert set(described["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def test_every_field_of_a_body_is_described_once(schemas: dict[str, Any]) -> None:
    everywhere = [schemas, site(**POOLING).get("/openapi.json").json()["components"]["schemas"]]
    described = {
        name
        for group in everywhere
        for schema in group.values()
        for name in schema.get("properties", {})
        if name in FIELDS
    }
    assert described == set(FIELDS), "descriptions of fields that do not exist"
    for kind in [*BODIES.values(), "SamplingParams", "StructuredOutputs", "MessagesBody", "PauseBody", "StartUpdate"]:
        for name, field in schemas[kind]["properties"].items():
            assert field.get("description"), f"{kind}.{name}: add it to server/descriptions.py"


def test_examples_are_answered(server: Site) -> None:
    bodies = {kind: path for path, kind in BODIES.items()}
    bodies |= {
        "MessagesBody": "/v1/messages",
        "TokenizeBody": "/tokenize",
        "DetokenizeBody": "/detokenize",
        "AbortBody": "/abort_requests",
        "PauseBody": "/pause",
    }
    assert bodies.keys() == EXAMPLES.keys()
    for kind, path in bodies.items():
        answer = server.post(path, EXAMPLES[kind] | ({"model": "tiny"} if kind == "MessagesBody" else {}))
        assert answer.status_code == 200, (kind, answer.text)


def test_the_example_that_a_route_shows_is_answered(server: Site) -> None:
    """Routes with the body of another one may need other fields of it."""
    document = server.get("/openapi.json").json()
    shown = 0
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is not None:
            schema = document["components"]["schemas"].get(content["schema"].get("$ref", "").rpartition("/")[2], {})
            for example in [content["example"]] if "example" in content else schema.get("examples", []):
                server.post("/resume")  # the example of /pause
                answer = server.post(path, example | ({"model": "tiny"} if "model" in example else {}))
                assert answer.status_code == 200, (path, answer.text)
                shown += 1
    assert shown > 10


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_api_as_a_page(path: str) -> None:
    page = site(ui=True).get(path)
    assert page.status_code == 200 and '"openapi.json"' in page.text.replace("'", '"')
    assert site(ui=False).get(path).status_code == 404


@pytest.mark.parametrize(
    ("prefix", "servers"), [("/api", [{"url": "/api"}]), ("api/v2/", [{"url": "/api/v2"}]), ("", None)]
)
def test_behind_a_proxy_the_document_names_its_prefix(prefix: str, servers: Any) -> None:
    assert site(root_path=prefix).get("/openapi.json").json().get("servers") == servers
