"""Anthropic's routes of a real server: garbage in their own error shape, and answers that are chat's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.api import CHAT, JSON, MESSAGES, Api
from tests.conformance.test_http import BROKEN

CREATE, COUNT, RENDER = "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"
ASK: dict[str, Any] = {"max_tokens": 16, "messages": MESSAGES, "temperature": 0}
TOOL: dict[str, Any] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


@pytest.fixture(params=[CREATE, COUNT, RENDER])
def path(request: pytest.FixtureRequest, text: Api) -> str:
    if text.other:
        pytest.skip("another server's shapes differ in details")
    route: str = request.param
    return route


def refused(answer: Any, status: int = 400, kind: str = "invalid_request_error") -> str:
    assert answer.status_code == status and answer.headers["content-type"] == JSON, answer.text
    body = answer.json()
    assert body == {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}
    message: str = body["error"]["message"]
    assert message
    return message


@pytest.mark.parametrize("raw", BROKEN, ids=range(len(BROKEN)))
def test_broken_bodies_are_refused_in_anthropics_shape(api: Api, path: str, raw: bytes) -> None:
    refused(api.post(path, content=raw, headers={"Content-Type": JSON}))


ATOMS: list[Any] = [None, True, -1, 2**63, 1.5, "", "x", "\u0000", [], {}, [None], [[]], {"": {}}, [{"type": "x"}]]
FIELDS = (
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "max_tokens",
    "stop_sequences",
    "stream",
    "temperature",
    "metadata",
    "cache_salt",
    "chat_template_kwargs",
    "logit_bias",
)


@pytest.mark.some(15)
@pytest.mark.parametrize("field", FIELDS)
def test_values_of_every_kind_are_taken_or_refused(api: Api, path: str, field: str) -> None:
    for value in ATOMS:
        answer = api.post(path, {"model": api.model, "max_tokens": 2, "messages": MESSAGES} | {field: value})
        if answer.status_code == 404:
            assert field == "model" and refused(answer, 404, "not_found_error")
        elif answer.status_code != 200:
            assert field in refused(answer), value


def test_blocks_of_every_kind_are_taken_or_refused(api: Api, path: str) -> None:
    kinds = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "document", "x", 5, None)
    for role in ("user", "assistant", "system"):
        for kind in kinds:
            for more in ({}, {"text": 5, "thinking": 5, "id": 5, "tool_use_id": "a", "content": [{"type": kind}]}):
                turns = [*MESSAGES, {"role": role, "content": [{"type": kind, **more}]}]
                answer = api.post(path, {"model": api.model, "max_tokens": 2, "messages": turns})
                if answer.status_code != 200:
                    assert "messages[1].content[0]" in refused(answer), turns


def events(answer: Any) -> list[dict[str, Any]]:
    blocks = answer.text.split("\n\n")[:-1]
    parsed = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert [block.partition("\n")[0] for block in blocks] == [f"event: {event['type']}" for event in parsed]
    return parsed


def test_an_answer_is_chats_whole_and_streamed(text: Api) -> None:
    body = {"model": text.model} | ASK
    reply = text.ok(CREATE, body)
    chat = text.ok(CHAT, {"messages": MESSAGES, "max_tokens": 16, "temperature": 0})
    content = chat["choices"][0]["message"]["content"]
    assert reply["content"] == [{"type": "text", "text": content}] and reply["stop_reason"] in (
        "end_turn",
        "max_tokens",
    )
    usage = reply["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    streamed = events(text.post(CREATE, body | {"stream": True}))
    kinds = [event["type"] for event in streamed if event["type"] != "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert "".join(e["delta"]["text"] for e in streamed if e["type"] == "content_block_delta") == content
    assert streamed[-2]["delta"]["stop_reason"] == reply["stop_reason"]
    assert streamed[-2]["usage"]["output_tokens"] == usage["output_tokens"]


@pytest.mark.slow
def test_a_forced_call_and_its_result(text: Api) -> None:
    body = {"model": text.model, "max_tokens": 300, "messages": MESSAGES} | FORCED
    for choice in (FORCED["tool_choice"], {"type": "tool", "name": "weather"}):
        reply = text.ok(CREATE, body | {"tool_choice": choice})
        [call] = reply["content"]
        assert call["type"] == "tool_use" and call["input"]["city"] in ("Oslo", "Rome")
        assert reply["stop_reason"] == "tool_use" and reply["stop_sequence"] is None
    streamed = events(text.post(CREATE, body | {"stream": True, "temperature": 0}))
    parts = [e["delta"]["partial_json"] for e in streamed if e["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == text.ok(CREATE, body | {"temperature": 0})["content"][0]["input"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"model": text.model, "messages": turns, "tools": [TOOL]}
    counted = text.ok(COUNT, body)["input_tokens"]
    usage = text.ok(CREATE, body | {"max_tokens": 4})["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == len(text.ok(RENDER, body | {"max_tokens": 4})["token_ids"])


def test_structured_output(text: Api) -> None:
    form = {"type": "json_schema", "schema": TOOL["input_schema"]}
    body = {"model": text.model, "max_tokens": 200, "messages": MESSAGES, "output_config": {"format": form}}
    [block] = text.ok(CREATE, body)["content"]
    assert json.loads(block["text"])["city"] in ("Oslo", "Rome")
