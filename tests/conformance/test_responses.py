"""/v1/responses with the tools that agents send: forced calls of every kind, whole and streamed, and refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.conformance.api import Api
from tests.replies import named_events

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"input": "What is 47 + 38?", "max_output_tokens": 200, "temperature": 0, "request_id": "agent"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY}
MAPS: dict[str, Any] = {
    "type": "namespace",
    "name": "maps",
    "description": "Of places.",
    "tools": [WEATHER | {"name": "find"}],
}


def custom(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "patch", "description": "Edits.", "format": form}


LARK, REGEX = custom("lark", 'start: "begin " /[ab]{2,4}/ " end"'), custom("regex", "[0-9]{3}-[a-c]{2}")
PATCH = {"type": "custom", "name": "patch"}
FIND = {"type": "function", "name": "find", "namespace": "maps"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [FIND]}


@pytest.fixture
def server(text: Api) -> Api:
    """A server that has the route as it is described here."""
    if text.other:
        pytest.skip("another server's tools differ")
    return text


def output(server: Api, **fields: Any) -> list[dict[str, Any]]:
    """The items of a response, the same whole and streamed."""
    body = ASK | fields
    reply = server.ok(RESPONSES, body)
    answer = server.post(RESPONSES, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    events = named_events(answer.text)
    response = events[-1]["response"]
    assert response["output"] == reply["output"] and response["tools"] == body["tools"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == reply["output"]
    inputs = "".join(event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta")
    assert inputs == "".join(item.get("input", "") for item in done)
    items: list[dict[str, Any]] = reply["output"]
    return items


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "form"), [(LARK, r"begin [ab]{2,4} end"), (REGEX, r"[0-9]{3}-[a-c]{2}")], ids=["lark", "regex"]
)
def test_the_input_of_a_custom_tool_keeps_to_its_grammar(server: Api, tool: dict[str, Any], form: str) -> None:
    for seed in range(3):
        (item,) = output(server, tools=[WEATHER, tool], tool_choice=PATCH, temperature=1, seed=seed)
        assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "patch", "completed")
        assert re.fullmatch(form, item["input"]), item


def test_a_function_of_a_namespace_is_called_with_it(server: Api) -> None:
    for choice in (FIND, ALLOWED):
        item, *more = output(server, tools=[WEATHER, MAPS, LARK], tool_choice=choice, parallel_tool_calls=False)
        assert (item["type"], item["name"], item["namespace"]) == ("function_call", "find", "maps") and not more
        assert json.loads(item["arguments"])["city"] in ("Oslo", "Rome")


def test_a_tool_of_the_client_is_called_as_its_item(server: Api) -> None:
    (item,) = output(server, tools=[{"type": "apply_patch"}, WEATHER], tool_choice={"type": "apply_patch"})
    if item["type"] == "apply_patch_call":
        assert item["operation"]["type"] in ("create_file", "update_file", "delete_file")
    else:  # a weak model may write a path without end
        assert item["status"] == "incomplete" and item["name"] == "apply_patch"


def test_a_call_and_its_output_go_back(server: Api) -> None:
    (item,) = output(server, tools=[REGEX], tool_choice=PATCH)
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
    question = {"role": "user", "content": ASK["input"]}
    body = ASK | {"input": [question, item, result], "tools": [REGEX], "max_output_tokens": 8}
    assert server.ok(RESPONSES, body)["status"] in ("completed", "incomplete")


def test_hosted_tools_are_left_out(server: Api) -> None:
    answers = [
        server.post(RESPONSES, ASK | {"tools": tools}) for tools in ([WEATHER], [{"type": "web_search"}, WEATHER])
    ]
    assert [answer.headers.get("x-ignored-fields") for answer in answers] == [None, "tools[0]"]
    outputs = [answer.json()["output"] for answer in answers]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type"),
        ({"tools": [WEATHER, LARK], "tool_choice": "required"}, "tools[1].format"),
        ({"tools": [WEATHER, custom("lark", "start: (")], "tool_choice": PATCH}, "tools[1].format.definition"),
        ({"tools": [custom("regex", "[a"), WEATHER], "tool_choice": PATCH}, "tools"),
        ({"tools": [MAPS | {"tools": [{"type": "shell"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": ALLOWED}, "tool_choice.tools[0].name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "patch"}]}, "input[0].input"),
    ],
)
def test_refusals_name_the_field(server: Api, fields: dict[str, Any], param: str, stream: bool) -> None:
    server.refused(server.post(RESPONSES, ASK | {"stream": stream} | fields), 400, param)
