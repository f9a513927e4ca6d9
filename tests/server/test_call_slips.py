"""Calls that cannot be read, or are cut off, on every route (serving-faults F1): streamed and whole alike, no route
says that they are complete, and nothing of their text is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.replies import good, named_events
from tests.server.scripted_llm import says
from tests.server.site import Site, chat_site
from tests.server.test_anthropic_replies import put_together
from tests.server.test_tools import flat, joined
from tests.text.test_model_slips import MUTATIONS, NOT_JSON, readable
from tests.text.tool_templates import CODER, DEEPSEEK, HERMES, LLAMA, MISTRAL_ARGS, OPENED
from tests.tiers import slow_after

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
QUESTION = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "request_id": "r"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: QUESTION | {"tools": [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]},
    RESPONSES: {
        "input": "hi",
        "max_output_tokens": 900,
        "request_id": "r",
        "tools": [{"type": "function", "name": "write", "parameters": SCHEMA}],
    },
    MESSAGES: QUESTION | {"model": "tiny", "tools": [{"name": "write", "input_schema": SCHEMA}]},
}
WRITTEN = {
    "hermes": (HERMES, '<tool_call>\n{"name": "write", "arguments": %s}\n</tool_call>'),
    "mistral": (MISTRAL_ARGS, "[TOOL_CALLS]write[ARGS]%s"),
    "llama3_json": (LLAMA, '{"name": "write", "parameters": %s}'),
    "deepseek_v31": (DEEPSEEK, "<｜tool▁call▁begin｜>write<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),  # noqa: RUF001
}


@pytest.fixture(scope="module", params=WRITTEN)
def server(request: pytest.FixtureRequest) -> tuple[Site, str]:
    """A server, and how its model writes a call."""
    template, call = WRITTEN[request.param]
    return chat_site("", template, max_model_len=8192), call


def replies(s: Site, text: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """The whole replies of the routes to a model that says `text`; their streams say the same."""
    s.llm.script = says(text)
    answers = {}
    for path, body in BODIES.items():
        limit = {"max_output_tokens" if path == RESPONSES else name: value for name, value in fields.items()}
        answers[path] = good(s.post(path, body | limit))
        streamed = s.post(path, body | limit | {"stream": True})
        if path == CHAT:
            assert joined(s.events(path, body | limit)) == flat(answers[path])
        elif path == MESSAGES:
            assert put_together(named_events(streamed.text)) == answers[path]
        else:
            last = named_events(streamed.text)[-1]["response"]
            times = {"created_at", "completed_at"}
            assert {k: v for k, v in last.items() if k not in times} == {
                k: v for k, v in answers[path].items() if k not in times
            }
    return answers


def calls_of(answers: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """The calls that each reply says are complete."""
    [choice] = answers[CHAT]["choices"]
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return {
        CHAT: [readable(f["arguments"]) for f in functions] if choice["finish_reason"] == "tool_calls" else [],
        RESPONSES: [
            readable(item["arguments"])
            for item in answers[RESPONSES]["output"]
            if item["type"] == "function_call" and item["status"] == "completed"
        ],
        MESSAGES: [
            block["input"]
            for block in answers[MESSAGES]["content"]
            if block["type"] == "tool_use" and answers[MESSAGES]["stop_reason"] != "max_tokens"
        ],
    }


def on_every_route(calls: list[Any]) -> dict[str, list[Any]]:
    return {path: calls for path in BODIES}


SHORT = [text for text in NOT_JSON if len(text) < 400]
FEW = 3  # of several texts: tests/text reads all of them, and the slow tests on every route


@pytest.mark.some(4)
@pytest.mark.parametrize("arguments", slow_after(SHORT, FEW))
def test_a_call_that_is_not_json_is_complete_on_no_route(server: tuple[Site, str], arguments: str) -> None:
    s, call = server
    answers = replies(s, call % arguments)
    assert calls_of(answers) == {CHAT: [], RESPONSES: [], MESSAGES: []}
    [choice] = answers[CHAT]["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith(arguments[:40])
    assert [item["status"] for item in answers[RESPONSES]["output"]] == ["incomplete"]
    assert answers[MESSAGES]["content"] == [{"type": "text", "text": call % arguments}]
    assert answers[MESSAGES]["stop_reason"] == "end_turn"


def test_raw_control_characters_are_escaped_on_every_route(server: tuple[Site, str]) -> None:
    s, call = server
    written = {"path": "a.py", "content": "line1\nline2\tend\x01"}
    raw = '{"path": "a.py", \n"content": "line1\nline2\tend\x01"}'
    assert calls_of(replies(s, call % raw)) == on_every_route([written])


def test_numbers_come_as_the_model_wrote_them(server: tuple[Site, str]) -> None:
    s, call = server
    text = '{"a": 123456789012345678901234567890, "b": 1.0, "c": 0.1000000000000000055511151231257827}'
    s.llm.script = says(call % text)
    answer = s.post(MESSAGES, BODIES[MESSAGES])
    assert f'"input":{text}' in answer.text and answer.json()["stop_reason"] == "tool_use"


@pytest.mark.some(2)
def test_a_call_that_is_cut_off_is_not_complete(server: tuple[Site, str]) -> None:
    s, call = server
    text = call % '{"path": "a.py", "content": "print(1)"}'
    cut = text.index("print") + 3
    answers = replies(s, text, max_tokens=cut)
    assert calls_of(answers) == {CHAT: [], RESPONSES: [], MESSAGES: []}
    assert answers[CHAT]["choices"][0]["finish_reason"] == "length"
    assert [item["status"] for item in answers[RESPONSES]["output"]] == ["incomplete"]
    [block] = answers[MESSAGES]["content"]
    assert answers[MESSAGES]["stop_reason"] == "max_tokens" and block["input"] == {"path": "a.py"}
    answers = replies(s, text[:cut])  # the model ends there by itself
    assert calls_of(answers) == {CHAT: [], RESPONSES: [], MESSAGES: []}
    assert answers[MESSAGES]["stop_reason"] == "end_turn"
    assert answers[MESSAGES]["content"] == [{"type": "text", "text": text[:cut]}]


def test_a_call_that_can_be_read_is_complete_beside_one_that_cannot() -> None:
    call = WRITTEN["hermes"][1]
    bad, fine = call % "{'path': 'p'}", call % '{"path": "q"}'
    for text in (bad + "\n" + fine, fine + "\n" + bad):
        answers = replies(chat_site("", max_model_len=4096), text)
        assert calls_of(answers) == {CHAT: [], RESPONSES: [{"path": "q"}], MESSAGES: [{"path": "q"}]}
        assert answers[CHAT]["choices"][0]["finish_reason"] == "stop" and answers[MESSAGES]["stop_reason"] == "tool_use"
        assert {"type": "text", "text": bad} in answers[MESSAGES]["content"]


@pytest.mark.some(2)
@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_mutated_calls_have_what_the_model_wrote_or_are_not_complete(server: tuple[Site, str], count: int) -> None:
    s, call = server
    rng = random.Random(3)
    for _ in range(count):
        written = {"path": rng.choice(["a", "b\n", '"']), "content": rng.choice(["x", 5, [{}], "\\n"])}
        text = call % json.dumps(written)
        first = call.index("%s") + 1
        last = len(text) - len(call) + call.index("%s") + 1
        place = rng.randrange(first, last)
        text = text[:place] + rng.choice(MUTATIONS) + text[place:]
        complete = calls_of(replies(s, text))
        assert len(complete[MESSAGES]) == len(complete[RESPONSES]) == len(complete[CHAT]), text
        assert complete[MESSAGES] == complete[CHAT] == complete[RESPONSES], text


CODER_CALL = "<tool_call>\n<function=write>\n<parameter=path>\n%s\n</parameter>\n</function>\n</tool_call>"
VALUES = ["ends with </parameter> here.", "a\n<parameter=other>\nb", "line1\nline2", "</tool_call>", 'say "hi"']


@pytest.mark.some(2)
@pytest.mark.parametrize("value", slow_after(VALUES, FEW))
def test_values_of_elements_are_whole_on_every_route(value: str) -> None:
    """F5 b: half a value was an object on /v1/messages."""
    s = chat_site("", CODER, max_model_len=4096)
    text = CODER_CALL % value
    assert calls_of(replies(s, text)) == on_every_route([{"path": value}])
    bare = text.removeprefix("<tool_call>\n")
    assert calls_of(replies(s, bare)) == on_every_route([{"path": value}])


def test_a_call_in_a_thought_that_does_not_end_is_a_call_on_every_route() -> None:
    """F11."""
    s = chat_site("", OPENED, reasoning_parser="qwen3", max_model_len=4096)
    answers = replies(s, "I should call " + WRITTEN["hermes"][1] % '{"path": "p"}')
    assert calls_of(answers) == on_every_route([{"path": "p"}])
    assert answers[CHAT]["choices"][0]["message"]["reasoning"] == "I should call"
    assert [item["type"] for item in answers[RESPONSES]["output"]] == ["reasoning", "function_call"]
    assert [block["type"] for block in answers[MESSAGES]["content"]] == ["thinking", "tool_use"]
    assert answers[MESSAGES]["stop_reason"] == "tool_use"
