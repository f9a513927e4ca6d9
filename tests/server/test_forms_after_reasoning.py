"""Forms and forced calls of a model that reasons (serving-faults F7): the thought first, then the form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.replies import good
from tests.server.site import Site, chat_site
from tests.text.tool_templates import HERMES, OPENED, THINKER
from tokserve.base.errors import RequestError
from tokserve.protocol.params import StructuredOutputs

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
THOUGHT = "I should say 1 <b> {"
ANSWER = '{"a": 1}'


def opened(text: str, **options: Any) -> Site:
    return chat_site(text, OPENED, reasoning_parser="qwen3", **options)


def form_of(s: Site) -> StructuredOutputs | None:
    return s.llm.calls[-1].params.structured_outputs


FORCED = '[{"name": "f", "parameters": {"a": 1}}]'
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CASES: list[tuple[str, dict[str, Any], bool]] = [  # the text after the thought, the body, whether it is a call
    (ANSWER, {"response_format": FORM}, False),
    (ANSWER, {"response_format": {"type": "json_object"}}, False),
    (ANSWER, {"structured_outputs": {"json": SCHEMA}}, False),
    ("yes", {"structured_outputs": {"choice": ["yes", "no"]}}, False),
    ("ab", {"structured_outputs": {"regex": "[ab]+"}}, False),
    ("ab", {"structured_outputs": {"grammar": 'start: "ab"'}}, False),
    (ANSWER, {"tools": [TOOL], "tool_choice": NAMED}, True),
    (FORCED, {"tools": [TOOL], "tool_choice": "required"}, True),
    (CALL, {"tools": [TOOL | {"function": TOOL["function"] | {"strict": True}}]}, True),
    (CALL, {"tools": [TOOL], "response_format": FORM}, True),
    (ANSWER, {"tools": [TOOL], "response_format": FORM}, False),
]


@pytest.mark.parametrize(("text", "fields", "is_call"), CASES, ids=lambda value: str(value)[:40])
def test_an_open_thought_ends_before_the_form(text: str, fields: dict[str, Any], is_call: bool) -> None:
    s = opened(f"{THOUGHT}</think>\n\n{text}")
    choice = good(s.post(CHAT, {"messages": USER} | fields))["choices"][0]
    assert choice["message"]["reasoning"] == THOUGHT
    if is_call:
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == {"a": 1}
        assert choice["message"]["content"] is None
    else:
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
    form = form_of(s)
    assert form is not None and form.grammar is not None
    assert form.grammar.startswith("start: thought answer\n") and "<\\/think>" in form.grammar
    deltas = [event["choices"][0]["delta"] for event in s.events(CHAT, {"messages": USER} | fields)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == THOUGHT
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert content == (choice["message"]["content"] or "") and bool(calls) == is_call


@pytest.mark.parametrize(
    ("template", "more"),
    [
        (THINKER, {"chat_template_kwargs": {"enable_thinking": False}}),
        (THINKER, {"reasoning_effort": "none"}),
        (HERMES, {"reasoning_effort": "none"}),
        (HERMES, {"chat_template_kwargs": {"thinking": False}}),
    ],
)
def test_without_a_thought_the_form_begins_at_once(template: str, more: dict[str, Any]) -> None:
    s = chat_site(ANSWER, template, reasoning_parser="qwen3")
    choice = good(s.post(CHAT, {"messages": USER, "response_format": FORM} | more))["choices"][0]
    assert choice["message"]["content"] == ANSWER and choice["message"]["reasoning"] is None
    assert form_of(s) == StructuredOutputs(json=SCHEMA)


def test_a_server_s_default_can_switch_reasoning_off() -> None:
    s = chat_site(ANSWER, THINKER, reasoning_parser="qwen3", default_chat_template_kwargs={"enable_thinking": False})
    good(s.post(CHAT, {"messages": USER, "response_format": FORM}))
    assert form_of(s) == StructuredOutputs(json=SCHEMA)
    good(s.post(CHAT, {"messages": USER, "response_format": FORM, "reasoning_effort": "low"}))
    form = form_of(s)
    assert form is not None and form.grammar is not None


@pytest.mark.parametrize("text", [ANSWER, f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"])
def test_a_model_that_opens_its_thoughts_may_or_may_not_think(text: str) -> None:
    s = chat_site(text, THINKER, reasoning_parser="qwen3")
    message = good(s.post(CHAT, {"messages": USER, "response_format": FORM}))["choices"][0]["message"]
    assert message["content"] == ANSWER
    assert (message["reasoning"] or "").strip() == (THOUGHT if "<think>" in text else "")
    form = form_of(s)
    assert form is not None and form.grammar is not None and form.grammar.startswith("start: (GAP? ")


def test_a_continued_thought_ends_and_a_continued_answer_has_the_form_at_once() -> None:
    s = chat_site(f" 1.</think>{ANSWER}", HERMES, reasoning_parser="qwen3")
    body = {"response_format": FORM, "continue_final_message": True, "add_generation_prompt": False}
    thought = [*USER, {"role": "assistant", "content": "<think>\nIt is"}]
    message = good(s.post(CHAT, {"messages": thought} | body))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" 1.", ANSWER)
    form = form_of(s)
    assert form is not None and form.grammar is not None and form.grammar.startswith("start: thought answer")
    good(s.post(CHAT, {"messages": [*USER, {"role": "assistant", "content": "Here:"}]} | body))
    assert form_of(s) == StructuredOutputs(json=SCHEMA)


def test_without_a_parser_of_reasoning_the_form_is_the_whole_output() -> None:
    s = chat_site(ANSWER, OPENED)
    good(s.post(CHAT, {"messages": USER, "response_format": FORM}))
    assert form_of(s) == StructuredOutputs(json=SCHEMA)


def test_responses_and_messages_reason_first() -> None:
    s = opened(f"{THOUGHT}</think>\n\n{ANSWER}")
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    output = good(s.post("/v1/responses", {"input": "a", "text": text}))["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["text"] == ANSWER
    body = {
        "model": "tiny",
        "max_tokens": 100,
        "messages": USER,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    blocks = good(s.post("/v1/messages", body))["content"]
    assert [block["type"] for block in blocks] == ["thinking", "tool_use"]
    assert blocks[0]["thinking"] == THOUGHT and blocks[1]["input"] == {"a": 1}


def test_choices_think_apart() -> None:
    s = opened(f"{THOUGHT}</think>{ANSWER}")
    reply = good(s.post(CHAT, {"messages": USER, "response_format": FORM, "n": 2}))
    assert [choice["message"]["content"] for choice in reply["choices"]] == [ANSWER, ANSWER]
    tokens = len(f"{THOUGHT}</think>{ANSWER}") + 1
    assert reply["usage"]["completion_tokens"] == 2 * tokens


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": FORM}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ],
)
def test_a_refusal_of_the_grammar_names_what_was_sent(fields: dict[str, Any], field: str) -> None:
    s = opened("a")
    s.llm.refuse = RequestError(
        "structured_outputs.grammar cannot be used: at 3(4): so", field="structured_outputs.grammar"
    )
    error = s.post(CHAT, {"messages": USER} | fields).json()["error"]
    assert error["param"] == field and error["message"] == f"{field} cannot be used: so"
