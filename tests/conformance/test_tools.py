"""Tool calls: forced ones of any model, in OpenAI's shapes, streamed or not, and what goes back into a conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.api import CHAT, CHAT_TOKENS, GENERATE, MESSAGES, PROMPT, TOKENIZE, Api

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ping"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ASK: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "temperature": 0, "request_id": "calls"}


def functions(choice: dict[str, Any], end: str = "tool_calls") -> list[tuple[str, dict[str, Any]]]:
    assert choice["finish_reason"] == end and choice["message"]["content"] is None
    assert all(call["type"] == "function" for call in choice["message"]["tool_calls"])
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def check(functions: list[tuple[str, dict[str, Any]]]) -> None:
    for name, arguments in functions:
        assert arguments == {} if name == "ping" else arguments.keys() == {"city", "days"}


@pytest.mark.parametrize("route", [CHAT, CHAT_TOKENS])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call(text: Api, route: str, choice: Any) -> None:
    body = ASK | {"tool_choice": choice, "parallel_tool_calls": False}
    if route == CHAT_TOKENS:
        body = {name: value for name, value in body.items() if name != "messages"} | {"tokens": PROMPT}
    [actual] = text.ok(route, body)["choices"]
    generated = functions(actual, "tool_calls" if choice == "required" else "stop")
    check(generated)
    assert len(generated) == 1 and (choice == "required" or generated[0][0] == "weather")


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": NAMED}, {"tool_choice": "auto"}], ids=str
)
def test_streamed_calls_equal_the_reply(text: Api, fields: dict[str, Any]) -> None:
    extra = {"n": 2, "temperature": 0.7, "seed": 4, "logprobs": True, "return_token_ids": True, "max_tokens": 120}
    body = ASK | fields | extra
    choices = text.ok(CHAT, body)["choices"]
    joined: list[dict[str, Any]] = [{"content": "", "calls": [], "ids": [], "logprobs": []} for _ in choices]
    for event in text.events(CHAT, body | {"stream": True}):
        for part in event["choices"]:
            choice, delta = joined[part["index"]], part["delta"]
            choice["content"] += delta.get("content", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(choice["calls"]) and call["type"] == "function"
                    choice["calls"].append([call["id"], call["function"]["name"], ""])
                choice["calls"][call["index"]][2] += call["function"]["arguments"]
            choice["ids"] += part.get("token_ids", [])
            choice["logprobs"] += (part.get("logprobs") or {"content": []})["content"]
            choice["finish"] = part["finish_reason"]
    for choice, streamed in zip(choices, joined, strict=True):
        calls = [
            [c["id"], c["function"]["name"], c["function"]["arguments"]]
            for c in choice["message"].get("tool_calls", [])
        ]
        assert streamed["calls"] == calls and streamed["content"] == (choice["message"]["content"] or "")
        assert streamed["ids"] == choice["token_ids"] and streamed["logprobs"] == choice["logprobs"]["content"]
        assert streamed["finish"] == choice["finish_reason"]


@pytest.mark.parametrize("choice", ["required", NAMED, "auto"], ids=["required", "named", "auto"])
def test_render_generate_and_derender_are_chat(text: Api, choice: Any) -> None:
    body = ASK | {"tool_choice": choice, "logprobs": True, "top_logprobs": 2, "request_id": "three-steps"}
    generated = text.ok(GENERATE, text.ok(CHAT + "/render", body))
    back = text.ok(CHAT + "/derender", {"generate_response": generated, "chat_request": body})
    assert back["choices"] == text.ok(CHAT, body)["choices"]


def test_calls_in_the_models_own_format_are_read(text: Api) -> None:
    """The demo model makes none of its own accord, so it is forced to write one."""
    if text.config["server"].get("tool_call_parser") != "auto" or text.model != "demo":
        pytest.skip("the format of another model")
    written = 'Yes.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    generated = text.generate({"structured_outputs": {"choice": [written]}, "max_tokens": 200})
    back = text.ok(CHAT + "/derender", {"generate_response": generated, "chat_request": ASK})
    message, reason = back["choices"][0]["message"], back["choices"][0]["finish_reason"]
    assert message["content"] == "Yes." and reason == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Oslo"}'}
    ]


VERDICT = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}},
    "required": ["right"],
    "additionalProperties": False,
}
SHAPED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}},
    {"structured_outputs": {"json": VERDICT, "disable_any_whitespace": True}},
]


@pytest.mark.some(3)
@pytest.mark.parametrize("fields", SHAPED, ids=["response_format", "structured_outputs"])
@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_of_some_form_or_calls(text: Api, fields: dict[str, Any], parallel: bool) -> None:
    """What the output begins with says which of them it is."""
    if text.model != "demo":
        pytest.skip("the format of another model")
    begins = {mark: text.ok(TOKENIZE, {"prompt": mark, "add_special_tokens": False})["tokens"][0] for mark in "<{"}
    body = ASK | fields | {"parallel_tool_calls": parallel, "max_tokens": 160, "temperature": 1}
    for seed in range(3):
        request = body | {"seed": seed, "logit_bias": {begins["{"]: 50, begins["<"]: -50}}
        [choice] = text.ok(CHAT, request)["choices"]
        assert json.loads(choice["message"]["content"]).keys() == {"right"} and choice["finish_reason"] == "stop"
        request = body | {"seed": seed, "logit_bias": {begins["<"]: 8}, "return_token_ids": True}
        [choice] = text.ok(CHAT, request)["choices"]
        if choice["finish_reason"] == "length":  # of calls without end
            assert parallel
            continue
        check(functions(choice))
        assert parallel or len(choice["message"]["tool_calls"]) == 1


def test_a_strict_function_changes_nothing_of_other_text(text: Api) -> None:
    strict = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    body = ASK | {"max_tokens": 24, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    for question in ("What is 47 + 38?", "Reverse: abc", "é <tool_cal"):
        request = body | {"messages": [{"role": "user", "content": question}]}
        assert text.ok(CHAT, request | {"tools": strict})["choices"] == text.ok(CHAT, request)["choices"]


def test_the_result_of_a_call_is_sent_back(text: Api) -> None:
    message = text.ok(CHAT, ASK | {"tool_choice": NAMED})["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    [choice] = text.ok(CHAT, ASK | {"messages": [*MESSAGES, message, result], "max_tokens": 8})["choices"]
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"type": "object", "properties": {"a": {"type": "foo"}}},
                        },
                    }
                ],
            },
            "tools[0].function.parameters",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(text: Api, fields: dict[str, Any], param: str, stream: bool) -> None:
    text.refused(text.post(CHAT, ASK | fields | {"stream": stream}), 400, param)
