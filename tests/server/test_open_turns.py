"""Where answers begin, inside the reasoning or after it (serving-faults F3): what the prompt's open turn says, on every
route."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replies import good, named_events
from tests.server.byte_tokenizer import TOKENIZER, ids
from tests.server.site import chat_site
from tests.server.test_anthropic_replies import put_together
from tests.server.test_tools import flat, joined
from tests.text.test_parsing import THOUGHTS
from tests.text.tool_templates import HERMES, MISTRAL, OPENED, THINKER
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.open_turn import answer_start
from tokserve.features.chat.output_format import AnswerStart

CHAT, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"
USER = {"role": "user", "content": "hi"}
# as R1-Distill's: an answer to a tool's result has no header and no thought
DISTILL = (
    "{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.tool = false %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}{% set ns.tool = true %}<|tool|>{{ m.content }}<|/tool|>"
    "{% else %}<|Assistant|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}"
    "{% endfor %}<|end|>{% endif %}{% endfor %}{{ tools | length if tools }}"
    "{% if add_generation_prompt and not ns.tool %}<|Assistant|>{{ open | default('<think>\n') }}{% endif %}"
)
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny, and <think> is a tag"}
PLAIN = {"chat_template_kwargs": {"open": ""}}  # R1's first template
Row = tuple[str, str, list[dict[str, Any]], dict[str, Any], str, str | None, str | None]


def begun(text: str) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": text}]


CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
ROWS: list[Row] = [
    ("deepseek_r1", HERMES, begun("The answer is"), CONTINUED, " 42", None, " 42"),
    ("deepseek_r1", HERMES, begun("<think>ok</think>\n\nThe answer is"), CONTINUED, " 42", None, " 42"),
    ("deepseek_r1", HERMES, begun("<think>\nThe user"), CONTINUED, " waits.\n</think>\n\nHello", " waits.", "Hello"),
    ("qwen3", HERMES, begun("<think>\nThe user"), CONTINUED, " waits.\n</think>\n\nHello", " waits.", "Hello"),
    ("qwen3", HERMES, begun("The answer is"), CONTINUED, " 42", None, " 42"),
    ("qwen3", OPENED, begun("<think>\n"), CONTINUED, "hm</think>Yes", "hm", "Yes"),
    ("mistral", MISTRAL, begun("[THINK]The user"), CONTINUED, " waits.[/THINK]Hello", " waits.", "Hello"),
    ("mistral", MISTRAL, begun("[THINK]ok[/THINK]The"), CONTINUED, " waits", None, " waits"),
    # the template's own beginning
    ("deepseek_r1", HERMES, [USER], {}, "hm</think>Yes", "hm", "Yes"),
    ("deepseek_r1", OPENED, [USER], {}, "hm</think>Yes", "hm", "Yes"),
    ("deepseek_r1", THINKER, [USER], {"chat_template_kwargs": {"enable_thinking": False}}, "Yes", None, "Yes"),
    ("deepseek_r1", DISTILL, [USER], {}, "hm</think>Yes", "hm", "Yes"),
    ("deepseek_r1", DISTILL, [USER], PLAIN, "hm</think>Yes", "hm", "Yes"),
    ("deepseek_r1", DISTILL, [USER], PLAIN, "<think>hm</think>Yes", "hm", "Yes"),
    ("qwen3", DISTILL, [USER], PLAIN, "Yes", None, "Yes"),
    # after a tool's result, and after what others say of the markers
    ("deepseek_r1", DISTILL, [USER, CALLED, RESULT | {"content": "sunny"}], {}, "It is fine.", None, "It is fine."),
    ("deepseek_r1", DISTILL, [USER, CALLED, RESULT | {"content": "sunny"}], PLAIN, "It is fine.", None, "It is fine."),
    ("qwen3", HERMES, [USER, CALLED, RESULT], {}, "It is fine.", None, "It is fine."),
    ("qwen3", HERMES, [USER | {"content": "what is <think>?"}], {}, "A tag.", None, "A tag."),
    ("deepseek_r1", HERMES, [USER | {"content": "x" * 300 + "</think>"}], {}, "hm</think>Yes", "hm", "Yes"),
    ("qwen3", HERMES, begun("<think>" + "long " * 200), CONTINUED, "so</think>Yes", "so", "Yes"),
]


@pytest.mark.some(11)
@pytest.mark.parametrize(("parser", "template", "messages", "fields", "text", "reasoning", "content"), ROWS)
def test_chat_reads_the_open_turn(
    parser: str,
    template: str,
    messages: list[Any],
    fields: dict[str, Any],
    text: str,
    reasoning: str | None,
    content: str | None,
) -> None:
    s = chat_site(text, template, reasoning_parser=parser, max_model_len=4096)
    body = {"messages": messages, "request_id": "r"} | fields
    reply = good(s.post(CHAT, body))
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, content)
    assert joined(s.events(CHAT, body)) == flat(reply)
    rendered = good(s.post(CHAT + "/render", body))
    generated = good(s.post(GENERATE, rendered))
    sent = {"generate_response": generated, "chat_request": body}
    for more in ({}, {"prompt_token_ids": rendered["token_ids"]}):
        assert good(s.post(CHAT + "/derender", sent | more))["choices"] == reply["choices"]
    by_ids = {"tokens": rendered["token_ids"], "request_id": "r"}
    assert good(s.post(CHAT + "/tokens", by_ids))["choices"] == reply["choices"]


@pytest.mark.parametrize(
    ("turn", "text", "blocks"),
    [
        ("The answer is", " 42", [("text", " 42")]),
        ("<think>\nThe user", " waits.</think>Hello", [("thinking", " waits."), ("text", "Hello")]),
        ("<think>ok</think>So", " 42", [("text", " 42")]),
    ],
)
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_messages_read_the_open_turn(parser: str, turn: str, text: str, blocks: list[tuple[str, str]]) -> None:
    s = chat_site(text, reasoning_parser=parser)
    body = {"model": "tiny", "max_tokens": 100, "messages": begun(turn), "request_id": "r"}
    reply = good(s.post(MESSAGES, body))
    assert [(block["type"], block[block["type"]]) for block in reply["content"]] == blocks
    streamed = s.post(MESSAGES, body | {"stream": True})
    assert put_together(named_events(streamed.text)) == reply


def test_responses_read_the_open_turn() -> None:
    result = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}}  # an object, as some send
    s = chat_site("It is fine.", DISTILL, reasoning_parser="deepseek_r1")
    reply = good(s.post("/v1/responses", {"input": [USER, call, result]}))
    assert [item["type"] for item in reply["output"]] == ["message"]
    as_text = good(s.post("/v1/responses", {"input": [USER, call | {"arguments": '{"a": 1}'}, result]}))
    assert as_text["output"][0]["content"] == reply["output"][0]["content"]
    assert s.llm.calls[-1].prompt == s.llm.calls[-2].prompt


def test_a_prompt_in_which_no_turn_can_be_told() -> None:
    for parser, prompt, inside in (
        ("qwen3", "x<think>\n", True),
        ("qwen3", "x", False),
        ("deepseek_r1", "x", True),
        ("deepseek_r1", "x</think>\n\n", False),
    ):
        for before in (None, "<|never|>", " \n"):
            assert answer_start(THOUGHTS[parser], TOKENIZER, ids(prompt), before) == AnswerStart(inside)


def test_what_a_template_writes_before_an_answer() -> None:
    rows = [
        (HERMES, "<|im_start|>assistant\n"),
        (OPENED, "<|im_start|>assistant\n<think>\n"),
        (MISTRAL, "[/INST]"),
        (DISTILL, "<|Assistant|><think>\n"),
        ("{{ raise_exception('') }}", None),
        ("{{ messages }", None),
    ]
    for template, expected in rows:
        assert ChatTemplate(TOKENIZER, HERMES).before_answer(template) == expected
    assert ChatTemplate(TOKENIZER, HERMES).before_answer() == rows[0][1]
