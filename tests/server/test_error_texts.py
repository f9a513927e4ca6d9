"""Error texts say what to change, where, and in the client's own words (serving-faults, error texts)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.site import Site, chat_site
from tests.text.tool_templates import HERMES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
UNIQUE = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}


def error_of(answer: Any) -> tuple[str | None, str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error.get("param"), error["message"]


def chat(*tools: dict[str, Any], s: Site | None = None, **fields: Any) -> tuple[str | None, str]:
    body = {"messages": [{"role": "user", "content": "a"}]} | ({"tools": tools} if tools else {}) | fields
    return error_of((s or chat_site("a")).post(CHAT, body))


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}} | more}


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
def test_a_schema_that_cannot_be_enforced_is_named_with_its_tool_and_place(fields: dict[str, Any]) -> None:
    path, text = chat(function("ok"), function("bad", UNIQUE), **fields)
    assert path == "tools[1].function.parameters"
    assert text == f"{path} cannot be used: uniqueItems cannot be enforced (at #/properties/tags/uniqueItems)"


def test_the_same_of_a_strict_tool_and_of_a_named_one() -> None:
    assert chat(function("ok"), function("bad", UNIQUE, strict=True))[0] == "tools[1].function.parameters"
    named = {"type": "function", "function": {"name": "bad"}}
    assert chat(function("ok"), function("bad", UNIQUE), tool_choice=named)[0] == "tools[1].function.parameters"
    free = chat_site("a").post(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [function("f", UNIQUE)]})
    assert free.status_code == 200  # nothing is enforced


def test_the_routes_name_tools_by_their_own_paths() -> None:
    flat = {"type": "function", "name": "bad", "parameters": UNIQUE}
    s = chat_site("a")
    path, text = error_of(s.post(RESPONSES, {"input": "a", "tools": [flat], "tool_choice": "required"}))
    assert path == "tools[0].parameters" and text.startswith("tools[0].parameters cannot be used: uniqueItems")
    deferred = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
    body = {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "a"}],
        "tools": [deferred, {"name": "bad", "input_schema": UNIQUE}],
        "tool_choice": {"type": "any"},
    }
    _, text = error_of(s.post(MESSAGES, body))
    assert text.startswith("tools[1].input_schema cannot be used: uniqueItems cannot be enforced (at #/properties/tags")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=b)"}}}, "look-ahead"),
        ({"type": "object", "properties": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}}, "use anyOf"),
        ({"type": "object", "properties": {"a": {"$ref": "http://b/c"}}}, "only references within the schema"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite value"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_without_the_library_s_words(schema: dict[str, Any], text: str) -> None:
    for path, message in (
        chat(function("f", schema), tool_choice="required"),
        chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}),
        chat(structured_outputs={"json": schema}),
    ):
        assert path and message.startswith(path) and text in message
        assert not any(word in message for word in ("json-schema:", "coerce", "retriever", "failed to compile", " | "))


def test_tools_in_the_form_of_responses_get_a_hint() -> None:
    path, text = chat({"type": "function", "name": "f", "parameters": {}})
    assert path == "tools[0].function" and '"function"' in text
    path, text = chat(function("f"), tool_choice={"type": "function", "name": "f"})
    assert path == "tool_choice.function" and '"function"' in text


@pytest.mark.parametrize("kind", ["web_search", "another"])
def test_another_tool_choice_is_refused_with_those_that_there_are(kind: str) -> None:
    _, text = chat(function("f"), tool_choice={"type": kind, "mode": "auto", "tools": []})
    assert f"'{kind}'" in text and "none, auto, required" in text
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    choice = {"type": kind, "mode": "auto", "tools": []}
    path, text = error_of(chat_site("a").post(RESPONSES, {"input": "a", "tools": [flat], "tool_choice": choice}))
    expected = "only OpenAI's servers run it" if kind == "web_search" else "none, auto, required"
    assert path.startswith("tool_choice") and expected in text


@pytest.mark.parametrize(
    "path", [CHAT, RESPONSES, MESSAGES, "/v1/completions", "/inference/v1/generate", "/v1/embeddings"]
)
def test_an_empty_body_is_called_empty(path: str) -> None:
    answer = chat_site("a").post(path, content=b"")
    assert answer.status_code == 400 and "the body is empty" in answer.json()["error"]["message"]


STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}x"


def test_what_a_template_raises_is_called_its_own() -> None:
    s = chat_site("a", STRICT)
    path, text = error_of(s.post(CHAT, {"messages": [{"role": "system", "content": "a"}]}))
    assert path == "messages" and text == "messages: Roles must alternate (raised by the model's chat template)"
    path, text = error_of(s.post(RESPONSES, {"input": "a", "instructions": "b"}))
    assert "Roles must alternate (raised by the model's chat template)" in text


NEEDS_ID = "{% for m in messages %}{% if m.role == 'tool' %}{{ m.tool_call_id + '' }}{% endif %}{% endfor %}"
NEEDS_CALL_ID = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id + '' }}{% endfor %}{% endfor %}"


def test_a_missing_id_of_a_call_is_named() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    path, text = error_of(chat_site("a", NEEDS_ID).post(CHAT, {"messages": messages}))
    assert path == "messages[1].tool_call_id" and text == f"{path} is required: the chat template needs it"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]  # type: ignore[dict-item]
    path, text = error_of(chat_site("a", NEEDS_CALL_ID).post(CHAT, {"messages": messages}))
    assert path == "messages[1].tool_calls[0].id" and text == f"{path} is required: the chat template needs it"


def test_other_faults_of_a_template_are_not_blamed_on_ids() -> None:
    messages = [{"role": "tool", "content": "b"}]
    path, text = error_of(chat_site("a", "{{ nothing.at.all }}").post(CHAT, {"messages": messages}))
    assert path == "messages" and "cannot render these messages" in text and "tool_call_id" not in text


@pytest.mark.parametrize("value", [None, "absent"])
def test_max_tokens_of_messages_is_required(value: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    body |= {"max_tokens": None} if value is None else {}
    _, text = error_of(chat_site("a", HERMES).post(MESSAGES, body))
    assert text == "max_tokens is required"


def test_a_route_that_resembles_a_stored_response_is_no_route() -> None:
    answer = chat_site("a").post("/v1/responses/nothing", {"input": "a"})
    assert answer.status_code == 404
