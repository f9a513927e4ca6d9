"""Answers that SGLang's routes read without generating: calls in a text, and reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.replies import good
from tests.server.site import Site, site

CALLS, REASONING = "/parse_function_call", "/separate_reasoning"
TOOL = {"type": "function", "function": {"name": "write", "parameters": {"properties": {"n": {"type": "integer"}}}}}
HERMES = '<tool_call>\n{"name": "write", "arguments": {"n": 5}}\n</tool_call>'
QWEN = "<tool_call>\n<function=write>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def server() -> Site:
    return site(sglang_api=True, tool_call_parser="qwen3_coder")


@pytest.mark.parametrize(
    ("parser", "text"), [("hermes", HERMES), ("qwen25", HERMES), ("qwen3_coder", QWEN), (None, QWEN), ("auto", QWEN)]
)
def test_calls_of_a_text(server: Site, parser: str | None, text: str) -> None:
    """peer-suites-3 A20.  SGLang's names of parsers, too; without one, the server's."""
    body = {"text": f"Ok.\n{text}\n{text}", "tools": [TOOL], "tool_call_parser": parser}
    reply = good(server.post(CALLS, body))
    assert reply["normal_text"] == "Ok."
    assert [(call["tool_index"], call["name"]) for call in reply["calls"]] == [(0, "write"), (1, "write")]
    assert [json.loads(call["parameters"]) for call in reply["calls"]] == [{"n": 5}] * 2


def test_text_without_complete_calls_stays(server: Site) -> None:
    for text in ("Hello <tool", "", HERMES[:-20]):
        reply = good(server.post(CALLS, {"text": text, "tool_call_parser": "hermes"}))
        assert reply == {"normal_text": text, "calls": []}


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "rest"),
    [
        ("qwen3", "<think>\na\n</think>\n\nb", "a", "b"),
        ("qwen3", "b", "", "b"),
        ("deepseek-r1", "a</think>b", "a", "b"),
        ("deepseek-r1", "<think>a</think>b", "a", "b"),
        ("deepseek-r1", "a", "a", ""),
        ("mistral", "[THINK]a[/THINK]b", "a", "b"),
    ],
)
def test_reasoning_of_a_text(server: Site, parser: str, text: str, reasoning: str, rest: str) -> None:
    reply = good(server.post(REASONING, {"text": text, "reasoning_parser": parser}))
    assert reply == {"reasoning_text": reasoning, "text": rest}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CALLS, {"tools": [TOOL]}, "text"),
        (CALLS, {"text": 5}, "text"),
        (CALLS, {"text": "x", "tool_call_parser": "none"}, "tool_call_parser"),
        (CALLS, {"text": "x", "tools": [{"type": "function"}]}, "tools[0].function.name"),
        (CALLS, {"text": "x", "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        (REASONING, {"text": "x"}, "reasoning_parser"),
        (REASONING, {"text": "x", "reasoning_parser": "thinker"}, "reasoning_parser"),
        (REASONING, {"text": "x", "reasoning_parser": "qwen3", "return_blocks": True}, "return_blocks"),
    ],
)
def test_bad_bodies_name_the_field(server: Site, path: str, body: dict[str, Any], field: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_they_are_there_with_the_option_only() -> None:
    for path in (CALLS, REASONING):
        answer = site().post(path, {"text": "x"})
        assert answer.status_code == 404 and "--sglang-api" in answer.json()["error"]["message"]


def test_a_server_without_a_parser_needs_its_name() -> None:
    plain = site(sglang_api=True, enable_auto_tool_choice=False)
    answer = plain.post(CALLS, {"text": "x"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_call_parser"
    assert good(plain.post(CALLS, {"text": "x", "tool_call_parser": "hermes"}))["normal_text"] == "x"
