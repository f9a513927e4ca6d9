"""output_mode "derender" of the token route: chat messages beside the tokens, as one reply and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replies import good
from tests.server.byte_tokenizer import ids
from tests.server.scripted_llm import says
from tests.server.site import Site, chat_site, site
from tests.text.tool_templates import HERMES, OPENED

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = 'see <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
INLINE = {"output_mode": "derender"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain \u00fc\U0001f600", HERMES, {}),
    (CALLS, HERMES, {"tools": [FUNCTION]}),
    (CALLS, HERMES, {"tools": [FUNCTION], "tool_choice": "none"}),
    ("why not</think>\n\nyes", OPENED, {}),
    ("why not</think>\n\nyes", OPENED, {"include_reasoning": False}),
    ("why" + "</think>" + CALLS, OPENED, {"tools": [FUNCTION], "n": 2}),
    ("ab stop cd", HERMES, {"stop": ["stop"]}),
]


def rendered(s: Site, body: dict[str, Any]) -> dict[str, Any]:
    return good(s.post(CHAT + "/render", body)) | INLINE


@pytest.mark.parametrize(("text", "template", "fields"), CASES, ids=range(len(CASES)))
def test_the_message_is_that_of_chat(text: str, template: str, fields: dict[str, Any]) -> None:
    s = chat_site(text, template)
    body = {"messages": MESSAGES, "request_id": "r"} | fields
    expected = [choice["message"] for choice in good(s.post(CHAT, body))["choices"]]
    sent = rendered(s, body)
    for more in ({}, {"parse_context": None, "chat_request": body}):
        reply = good(s.post(GENERATE, sent | more))
        assert [choice["message"] for choice in reply["choices"]] == expected
        assert all(choice["token_ids"] and "text" not in choice for choice in reply["choices"])


@pytest.mark.parametrize(("text", "template", "fields"), CASES, ids=range(len(CASES)))
def test_the_deltas_of_a_stream_are_the_message(text: str, template: str, fields: dict[str, Any]) -> None:
    s = chat_site(text, template)
    body = {"messages": MESSAGES} | fields
    sent = rendered(s, body)
    complete = good(s.post(GENERATE, sent))["choices"]
    joined: list[dict[str, Any]] = [{"first": True, "content": "", "reasoning": "", "calls": []} for _ in complete]
    tokens: list[list[int]] = [[] for _ in complete]
    for event in s.events(GENERATE, sent | {"stream": True}):
        for choice in event["choices"]:
            delta, into = choice["delta"], joined[choice["index"]]
            assert ("role" in delta) == into["first"]
            into["first"] = False
            into["content"] += delta.get("content", "")
            into["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    into["calls"].append({"name": call["function"]["name"], "arguments": ""})
                into["calls"][-1]["arguments"] += call["function"].get("arguments", "")
            tokens[choice["index"]] += choice["token_ids"]
    assert tokens == [choice["token_ids"] for choice in complete]
    for actual, choice in zip(joined, complete, strict=True):
        message = choice["message"]
        calls = [one["function"] for one in message.get("tool_calls", [])]
        assert (actual["content"], actual["reasoning"]) == (message["content"] or "", message["reasoning"] or "")
        assert actual["calls"] == calls


def test_what_a_rendered_chat_says_of_its_outputs() -> None:
    s = chat_site("ok", HERMES)
    assert "parse_context" not in rendered(s, {"messages": MESSAGES})
    context = rendered(s, {"messages": MESSAGES, "tools": [FUNCTION], "temperature": 0.5})["parse_context"]
    assert context == {"tools": [FUNCTION]}
    plain = good(s.post(GENERATE, {"token_ids": ids("a"), "parse_context": context}))  # without the mode: no effect
    assert "message" not in plain["choices"][0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (INLINE | {"chat_request": {"tools": 3}}, "chat_request.tools"),
        (INLINE | {"parse_context": []}, "parse_context"),
        ({"chat_request": {}}, "chat_request"),
        ({"output_mode": "speech"}, "output_mode"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    answer = site(says("a")).post(GENERATE, {"token_ids": ids("a")} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_tokens_only_server_has_no_messages() -> None:
    answer = site(says("a"), tokens_only=True).post(GENERATE, {"token_ids": [5]} | INLINE)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "output_mode"
