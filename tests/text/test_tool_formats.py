"""The tool formats, and their recognition from a chat template."""

from __future__ import annotations

import json

import pytest

from tests.server.byte_tokenizer import byte_tokenizer
from tests.text.tool_templates import SHOWS, UNKNOWN
from tokserve.features.chat import tool_formats
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.output_format import OutputFormat
from tokserve.features.chat.parsing import Parser

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
QUESTION = [{"role": "user", "content": "1+1?"}]
CALLS = [
    {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": i})}}
    for i in range(2)
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(), source)


@pytest.mark.parametrize(("name", "source"), SHOWS)
def test_a_template_shows_its_format(name: str, source: str) -> None:
    actual = tool_formats.recognize(template(source))
    assert actual is not None and actual.name == name


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_template_without_a_known_format(kind: str) -> None:
    assert tool_formats.recognize(template(UNKNOWN[kind])) is None


@pytest.mark.parametrize(("name", "source"), SHOWS)
def test_calls_that_a_template_writes_are_read_back(name: str, source: str) -> None:
    """What a client sends back as history is what it was told, so the next prompt begins with the last answer."""
    chat, form = template(source), tool_formats.named(tool_formats.TOOL_FORMATS, name)
    calls = CALLS[:1] if name == "llama3_json" else CALLS  # whose template shows one
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    prompt = chat.text(QUESTION, tools=TOOLS, add_generation_prompt=False)
    rendered = chat.text([*QUESTION, turn], tools=TOOLS, add_generation_prompt=False)
    assert rendered.startswith(prompt)
    answer = rendered[len(prompt) :].replace("<|start_header_id|>assistant<|end_header_id|>\n\n", "")
    reading = OutputFormat(form, functions={"add": TOOLS[0]["function"]["parameters"]})  # type: ignore[index]
    pieces = Parser(reading).push(answer, final=True)
    names = [text for kind, text in pieces if kind == "call"]
    arguments = "".join(text if kind == "arguments" else "\n" for kind, text in pieces if kind in ("call", "arguments"))
    assert names == ["add"] * len(calls)
    assert [json.loads(line) for line in arguments.splitlines()[1:]] == [{"a": i} for i in range(len(calls))]
