"""Structured outputs over HTTP: the forms, the parameters that the engine gets, and errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.scripted_llm import says
from tests.server.site import Site, site
from tokserve.base.errors import RequestError
from tokserve.protocol.params import StructuredOutputs

GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
TEXT = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": "x", "max_tokens": 4}}
ROUTES = pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def server() -> Site:
    return site(says("ok"))


def received_form(server: Site) -> StructuredOutputs | None:
    return server.llm.calls[-1].params.structured_outputs


def engine_form(server: Site) -> StructuredOutputs | None:
    return server.llm.calls[-1].form


def generate(value: Any) -> dict[str, Any]:
    return {"token_ids": [5], "sampling_params": {"max_tokens": 2, "structured_outputs": value}}


def refused(answer: Any, param: str, message: str = "") -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"], error


FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": '{"type": "object"}'},
    {"regex": "a+"},
    {"choice": ["a", "b"]},
    {"grammar": 'start: "a"'},
    {"json_object": True},
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json_object": True, "whitespace_pattern": "[ ]?"},
    {"regex": r"\d", "unicode_classes": True},
    {"json": SCHEMA, "disable_additional_properties": True},
    {"json": SCHEMA, "disable_additional_properties": False},
]
NOTHING = {"disable_fallback": False, "structural_tag": None, "regex": None}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_on_every_route(server: Site, form: dict[str, Any]) -> None:
    for value in (form, NOTHING | form):
        for path, body in [
            (GENERATE, generate(value)),
            *((r, b | {"structured_outputs": value}) for r, b in TEXT.items()),
        ]:
            assert server.post(path, body).status_code == 200, path
            assert received_form(server) == StructuredOutputs(**form)


@ROUTES
@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputs(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            StructuredOutputs(json=SCHEMA, disable_additional_properties=True),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}},
            StructuredOutputs(json=SCHEMA, disable_additional_properties=False),
        ),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
    ],
)
def test_response_format(
    server: Site, route: str, response_format: dict[str, Any], expected: StructuredOutputs | None
) -> None:
    assert server.post(route, TEXT[route] | {"response_format": response_format}).status_code == 200
    assert received_form(server) == expected


NESTED = {"name": "n", "schema": SCHEMA}


@ROUTES
@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "json_object", "schema": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        ({"type": "json_object", "json_schema": NESTED}, StructuredOutputs(json=SCHEMA)),
        ({"type": "json_schema", "schema": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
            StructuredOutputs(json=SCHEMA, disable_additional_properties=True),
        ),
    ],
)
def test_a_schema_beside_the_type_is_the_form(
    server: Site, route: str, response_format: dict[str, Any], expected: StructuredOutputs
) -> None:
    """llama.cpp, Together and Fireworks write it so (serving-faults F6)."""
    assert server.post(route, TEXT[route] | {"response_format": response_format}).status_code == 200
    assert received_form(server) == expected


@ROUTES
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"type": "json_object", "shema": SCHEMA}, ".shema"),
        ({"type": "text", "schema": SCHEMA}, ".schema"),
        ({"type": "json_schema", "json_schema": NESTED | {"stric": True}}, ".json_schema.stric"),
        ({"type": "json_schema", "json_schema": NESTED, "schema": SCHEMA}, ".schema"),
        ({"type": "json_object", "schema": 5}, ".schema"),
        ({"type": "json_object", "schema": {"not": {}}}, ""),
    ],
)
def test_nothing_of_a_response_format_is_ignored(server: Site, route: str, value: Any, path: str) -> None:
    refused(server.post(route, TEXT[route] | {"response_format": value}), f"response_format{path}")


def test_a_grammar_may_be_ebnf(server: Site) -> None:
    for route, body in TEXT.items():
        value = {"grammar": 'root ::= "yes" | "no"'}
        assert server.post(route, body | {"structured_outputs": value}).status_code == 200
        assert received_form(server) == StructuredOutputs(**value)
        value = {"grammar": 'root ::= ( "yes"'}
        refused(server.post(route, body | {"structured_outputs": value}), "structured_outputs.grammar", "EBNF")
        for name in ("ebnf", "grammar"):
            refused(server.post(route, body | {name: 'root ::= "yes"'}), name, "use structured_outputs.grammar")


def test_a_server_may_close_schemas_by_default() -> None:
    server = site(says("ok"), structured_outputs_closed=True)
    schema = {"name": "n", "schema": SCHEMA}
    for strict, shut in ((None, True), (True, True), (False, False)):
        form = {"type": "json_schema", "json_schema": schema | {"strict": strict}}
        for route, body in TEXT.items():
            assert server.post(route, body | {"response_format": form}).status_code == 200
            assert engine_form(server) == StructuredOutputs(json=SCHEMA, disable_additional_properties=shut).plain()
        response_format = {"type": "json_schema", **schema, "strict": strict}
        assert server.post("/v1/responses", {"input": "x", "text": {"format": response_format}}).status_code == 200
        assert engine_form(server) == StructuredOutputs(json=SCHEMA, disable_additional_properties=shut).plain()
    for value, shut in ((None, True), (False, False)):
        fields = {"json": SCHEMA, "disable_additional_properties": value}
        for path, body in [
            (GENERATE, generate(fields)),
            *((r, b | {"structured_outputs": fields}) for r, b in TEXT.items()),
        ]:
            assert server.post(path, body).status_code == 200
            assert engine_form(server) == StructuredOutputs(json=SCHEMA, disable_additional_properties=shut).plain()
    assert server.post(GENERATE, generate({"regex": "a"})).status_code == 200
    assert engine_form(server) == StructuredOutputs(regex="a").plain()


def test_a_server_may_have_compact_json_by_default() -> None:
    """peer suites A8: vLLM's structured_outputs_config has disable_any_whitespace."""
    server = site(says("ok"), structured_outputs_compact=True)
    compact = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    flexible = StructuredOutputs(json=SCHEMA, disable_any_whitespace=False)
    spaced = StructuredOutputs(json=SCHEMA, whitespace_pattern=" ?")
    for fields, expected in (
        ({"json": SCHEMA}, compact),
        ({"json": SCHEMA, "disable_any_whitespace": False}, flexible),
        ({"json": SCHEMA, "whitespace_pattern": " ?"}, spaced),
        ({"json_object": True}, StructuredOutputs(json_object=True, disable_any_whitespace=True)),
        ({"regex": "a"}, StructuredOutputs(regex="a")),
    ):
        bodies = [(GENERATE, generate(fields)), *((r, b | {"structured_outputs": fields}) for r, b in TEXT.items())]
        for path, body in bodies:
            assert server.post(path, body).status_code == 200
            assert engine_form(server) == expected.plain()
    for route, body in TEXT.items():
        form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        assert server.post(route, body | {"response_format": form}).status_code == 200
        assert engine_form(server) == compact.plain()


WRONG: list[tuple[Any, str, str]] = [
    ({}, "", "exactly one of"),
    ({"regex": "a", "choice": ["a"]}, "", "got regex and choice"),
    ({"choice": []}, ".choice", "empty"),
    ({"json": "{"}, ".json", "JSON"),
    ({"json": "[]"}, ".json", "object"),
    ({"regex": 5}, ".regex", "str"),
    ({"rejex": "a"}, ".rejex", "did you mean 'regex'"),
    ({"regex": "a", "structural_tag": "x"}, ".structural_tag", "not supported"),
    ({"json_object": False}, "", "exactly one of"),
    ({"regex": "a" * 20_000}, ".regex", "at most 16384 bytes"),
    ({"regex": "a", "disable_additional_properties": True}, ".disable_additional_properties", "json only"),
    ({"choice": ["a"], "unicode_classes": True}, ".unicode_classes", "json and regex only"),
    ({"regex": "a", "whitespace_pattern": "b"}, ".whitespace_pattern", "json"),
    ({"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": "b"}, ".whitespace_pattern", "exclusive"),
]


@pytest.mark.parametrize(("value", "path", "message"), WRONG, ids=lambda parameter: str(parameter)[:30])
def test_errors_name_the_field(server: Site, value: Any, path: str, message: str) -> None:
    refused(server.post(GENERATE, generate(value)), f"sampling_params.structured_outputs{path}", message)
    for route, body in TEXT.items():
        refused(server.post(route, body | {"structured_outputs": value}), f"structured_outputs{path}", message)


@ROUTES
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"type": "xml"}, ".type"),
        ({}, ".type"),
        ({"type": "json_schema"}, ".json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, ".json_schema.schema"),
        ("json", ""),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}, ".json_schema.schema"),
    ],
)
def test_errors_of_response_format(server: Site, route: str, value: Any, path: str) -> None:
    refused(server.post(route, TEXT[route] | {"response_format": value}), f"response_format{path}")


@ROUTES
def test_structured_outputs_and_response_format_exclude_each_other(server: Site, route: str) -> None:
    both = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    refused(server.post(route, TEXT[route] | both), "response_format", "not both")
    assert server.post(route, TEXT[route] | both | {"response_format": {"type": "text"}}).status_code == 200


def test_the_engines_refusal_has_the_clients_name_for_it(server: Site) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        server.llm.refuse = RequestError("structured_outputs.json cannot be used: so", field="structured_outputs.json")
        return server.post(path, body | {"stream": True})

    refused(post(GENERATE, generate({"json": {}})), "sampling_params.structured_outputs.json", "sampling_params.")
    for route, body in TEXT.items():
        refused(post(route, body | {"structured_outputs": {"json": {}}}), "structured_outputs.json")
        refused(
            post(route, body | {"response_format": {"type": "json_object"}}), "response_format", "response_format c"
        )


def test_old_field_names_are_refused_with_the_current_one(server: Site) -> None:
    for name, value in (("guided_json", {}), ("guided_regex", "a"), ("guided_json_object", True)):
        for route, body in TEXT.items():
            refused(server.post(route, body | {name: value}), name, "use structured_outputs")
            assert server.post(route, body | {name: None}).status_code == 200
    body = {"token_ids": [5], "sampling_params": {"guided_decoding": {"regex": "a"}}}
    refused(server.post(GENERATE, body), "sampling_params.guided_decoding", "use sampling_params.structured_outputs")


def test_structured_outputs_need_a_tokenizer() -> None:
    server = site(tokens_only=True)
    refused(server.post(GENERATE, generate({"regex": "a"})), "sampling_params.structured_outputs", "no tokenizer")


def test_render_returns_structured_outputs(server: Site) -> None:
    answer = server.post(f"{CHAT}/render", TEXT[CHAT] | {"response_format": {"type": "json_object"}})
    assert answer.json()["sampling_params"]["structured_outputs"] == {"json_object": True}
