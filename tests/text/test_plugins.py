"""Formats of tool calls and reasoning that another package brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.site import Site, chat_site
from tokserve.base.errors import StartError

FORMATS = '''
from tokserve.features.chat.output_format import Thinking, ToolFormat
from tokserve.features.chat.readers.sink import CallStatus


class Reader:
    """Reads NAME! as a call without arguments."""

    def __init__(self, cursor, output_format, form, sink):
        self._text, self._sink = cursor, sink

    def call(self):
        name = yield from self._text.word()
        if not name or (yield from self._text.literal("!")) is None:
            return CallStatus.NONE
        self._sink.begin_call(name)
        self._sink.add_arguments("{}")
        self._sink.end_call()
        return CallStatus.WHOLE


ROWS = [ToolFormat("mine", opens=("<call>",), closes="</call>"), Thinking("mine", "<plan>", "</plan>")]
READER = ToolFormat("shout", opens=("<do>",), closes="</do>", reader=Reader)
NOTHING = 5
'''
POINTS = """[tokserve.tool_parsers]
mine = formats_of_mine:ROWS
shout = formats_of_mine:READER
nothing = formats_of_mine:NOTHING
absent = formats_of_mine:ABSENT
lost = no_such_module:ROWS
"""
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</call>{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}<plan></plan>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "ping"}}]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in a directory of the path, with its entry points."""
    (tmp_path / "formats_of_mine.py").write_text(FORMATS)
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))


def message(site: Site) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    answer = site.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    actual: dict[str, Any] = answer.json()["choices"][0]["message"]
    return actual


def test_the_formats_of_a_plugin_are_recognized_and_can_be_named() -> None:
    text = '<plan>Hm.</plan>Ok <call>{"name": "ping", "arguments": {}}</call>'
    for options in ({}, {"tool_call_parser": "mine", "reasoning_parser": "mine"}):
        actual = message(chat_site(text, TEMPLATE, tool_parser_plugin="mine", **options))
        assert (actual["reasoning"], actual["content"]) == ("Hm.", "Ok")
        assert [call["function"]["name"] for call in actual["tool_calls"]] == ["ping"]
    hermes = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'  # the built-in ones are still there
    assert message(chat_site(hermes, tool_parser_plugin="mine"))["tool_calls"]


def test_a_plugin_may_read_calls_by_itself() -> None:
    actual = message(chat_site("Ok <do>ping!</do> <do>ping?", tool_parser_plugin="shout", tool_call_parser="shout"))
    assert [call["function"] for call in actual["tool_calls"]] == [{"name": "ping", "arguments": "{}"}]
    assert actual["content"] == "Ok <do>ping?"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tool_parser_plugin": "other"},
            "no installed package has an entry point 'other'.*there are: absent, lost, mine",
        ),
        ({"tool_parser_plugin": "nothing"}, "formats_of_mine:NOTHING must be a ToolFormat.*holds int"),
        ({"tool_parser_plugin": "absent"}, "formats_of_mine:ABSENT cannot be loaded"),
        ({"tool_parser_plugin": "lost"}, "no_such_module:ROWS cannot be loaded"),
        (
            {"tool_parser_plugin": "mine", "tool_call_parser": "x"},
            "option tool_call_parser: must be auto or one of mine, ",
        ),
        (
            {"tool_parser_plugin": "mine", "reasoning_parser": "x"},
            "option reasoning_parser: must be auto or one of mine, ",
        ),
    ],
)
def test_a_plugin_that_is_not_there_or_holds_no_formats(options: dict[str, str], words: str) -> None:
    with pytest.raises(StartError, match=words):
        chat_site("", TEMPLATE, **options)
