"""The outputs of the served families: each is parsed in the same way however it arrives, and no call of one that ends
early is complete before all of it has arrived."""

from __future__ import annotations

import json

import pytest

from tests.server.byte_tokenizer import byte_tokenizer
from tests.text.family_outputs import FUNCTIONS, OUTPUTS, Output, Pieces
from tests.text.family_templates import SHOWS, TELLS
from tests.text.test_parsing import FORMATS, THOUGHTS, add
from tokserve.features.chat import tool_formats
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.output_format import OutputFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.tool_formats import THINKING, TOOL_FORMATS

FAMILIES = pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.family)


def parser(output: Output, *, whole_calls: bool = False) -> Parser:
    form = FORMATS[output.tools] if output.tools else None
    thinking = THOUGHTS[output.thinking] if output.thinking else None
    return Parser(OutputFormat(form, thinking, FUNCTIONS), whole_calls=whole_calls)


def read(reader: Parser, *texts: str, cut: bool = False) -> Pieces:
    pieces: Pieces = []
    for text in texts:
        for kind, piece in reader.push(text):
            add(pieces, kind, piece)
    for kind, piece in reader.push("", final=True, cut=cut):
        add(pieces, kind, piece)
    return pieces


def calls(pieces: Pieces) -> list[tuple[str, str]]:
    """Names and arguments."""
    return [
        (text, pieces[at + 1][1] if pieces[at + 1 : at + 2] and pieces[at + 1][0] == "arguments" else "")
        for at, (kind, text) in enumerate(pieces)
        if kind == "call"
    ]


@pytest.mark.some(20)
@FAMILIES
def test_an_output_is_parsed_in_the_same_way_however_it_arrives(output: Output) -> None:
    text, num_calls = output.text, len(calls(output.pieces))
    for place in range(len(text) + 1):
        reader = parser(output, whole_calls=place % 8 == 0)
        assert read(reader, text[:place], text[place:]) == output.pieces, text[:place]
        assert reader.is_whole == [True] * num_calls
    for whole_calls in (False, True):
        assert read(parser(output, whole_calls=whole_calls), *text) == output.pieces


@pytest.mark.some(24)
@FAMILIES
def test_a_call_is_complete_only_when_all_of_its_arguments_have_arrived(output: Output) -> None:
    expected = [(name, json.loads(arguments)) for name, arguments in calls(output.pieces)]
    for place in range(len(output.text)):
        reader = parser(output)
        begun = calls(read(reader, output.text[:place]))
        assert len(begun) == len(reader.is_whole)
        complete = [
            (name, json.loads(arguments))
            for (name, arguments), is_whole in zip(begun, reader.is_whole, strict=True)
            if is_whole
        ]
        assert complete == expected[: len(complete)], output.text[:place]
        if place % 4:
            continue
        reader = parser(output, whole_calls=True)
        assert calls(read(reader, output.text[:place])) == calls(output.pieces)[: len(complete)]


def test_every_parser_has_an_output() -> None:
    assert {output.tools for output in OUTPUTS} - {None} == {form.name for form in TOOL_FORMATS}
    assert {output.thinking for output in OUTPUTS} - {None} == {thinking.name for thinking in THINKING}


@pytest.mark.parametrize("name", [form.name for form in TOOL_FORMATS])
def test_markers_of_other_families_are_content(name: str) -> None:
    form = FORMATS[name]
    markers = {*form.markers(), form.begins, "<|start|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"}
    others = {mark for other in TOOL_FORMATS for mark in other.markers()} - markers
    others = {mark for mark in others if not any(part and part in mark for part in markers)}
    text = "Text " + " and ".join(sorted(others)) + " so."
    reader = Parser(OutputFormat(form, None, FUNCTIONS))
    assert read(reader, text) == [("content", text)] and reader.num_begun == 0


def test_the_ids_that_a_model_gives_its_calls() -> None:
    kimi = next(output for output in OUTPUTS if output.tools == "kimi_k2")
    for whole_calls in (False, True):
        reader = parser(kimi, whole_calls=whole_calls)
        read(reader, kimi.text)
        assert reader.call_ids == ["functions.get_weather:0", "functions.now:1"]
    reader = Parser(OutputFormat(FORMATS["kimi_k2"], None, FUNCTIONS))
    text = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    pieces = read(reader, text.format("now"), text.format("functions.a.b:x"), text.format("functions.a:b:12"))
    assert [name for name, _ in calls(pieces)] == ["now", "a.b:x", "a:b"]
    hermes = Parser(OutputFormat(FORMATS["hermes"], None, FUNCTIONS))
    read(hermes, '<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    assert hermes.call_ids == [""]


QUESTION = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": FUNCTIONS[name]}} for name in FUNCTIONS]


@pytest.mark.parametrize(("tools", "thinking", "source"), SHOWS)
def test_a_template_shows_its_parsers(tools: str, thinking: str | None, source: str) -> None:
    chat = ChatTemplate(byte_tokenizer(), source)
    form, thoughts = tool_formats.recognize(chat), tool_formats.recognize_thinking(chat)
    assert form is not None and form.name == tools
    assert (thoughts.name if thoughts else None) == thinking


def test_an_answer_does_not_begin_with_a_thought_because_a_template_cuts_thoughts_off_earlier_ones() -> None:
    """LFM 2.5 has such a template, and its models may or may not think."""
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    thoughts = tool_formats.recognize_thinking(ChatTemplate(byte_tokenizer(), source))
    assert thoughts is not None and thoughts.name == "qwen3" and not thoughts.assumed


@pytest.mark.parametrize("tools", TELLS)
def test_a_template_that_shows_no_calls_is_recognized_by_its_texts(tools: str) -> None:
    form = tool_formats.recognize(ChatTemplate(byte_tokenizer(), TELLS[tools]))
    assert form is not None and form.name == tools


@pytest.mark.parametrize("tools", ["phi4_mini_json", "granite", "internlm", "olmo3", "lfm2"])
def test_calls_that_a_template_does_not_show_are_written_as_the_model_writes_them(tools: str) -> None:
    chat, arguments = ChatTemplate(byte_tokenizer(), TELLS[tools]), {"city": 'Os"lo', "units": [None, True, {"a": 1}]}
    parallel = [("get_weather", arguments), ("now", {})]
    turn = {
        "role": "assistant",
        "content": "Look.",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
            for name, values in parallel
        ],
    }
    shown = chat.text([*QUESTION, turn], tools=TOOLS, add_generation_prompt=False)
    assert "Os" not in shown
    chat.write_calls_as(FORMATS[tools])
    for content in ("Look.", [{"type": "text", "text": "Look."}]):
        text = chat.text([*QUESTION, turn | {"content": content}], tools=TOOLS, add_generation_prompt=False)
        answer = text[text.index("Look.") :].removesuffix("[end]\n")
        reader = Parser(OutputFormat(FORMATS[tools], None, FUNCTIONS))
        pieces = read(reader, answer)
        assert pieces[0] == ("content", "Look.") and reader.complete
        assert [(name, json.loads(values)) for name, values in calls(pieces)] == parallel


@pytest.mark.parametrize(("tools", "thinking", "source"), SHOWS)
def test_what_a_template_shows_of_calls_is_read_back(tools: str, thinking: str | None, source: str) -> None:
    """The next prompt shows the calls as the model wrote them, so it begins with the last answer."""
    chat, arguments = ChatTemplate(byte_tokenizer(), source), {"city": "Oslo", "days": 3}
    function = {"name": "get_weather", "arguments": json.dumps(arguments)}
    call = {"id": "functions.get_weather:0", "type": "function", "function": function}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = chat.text(QUESTION, tools=TOOLS, add_generation_prompt=False)
    answer = chat.text([*QUESTION, turn], tools=TOOLS, add_generation_prompt=False)[len(before) :]
    answer = answer.removeprefix("[assistant]")
    reader = Parser(OutputFormat(FORMATS[tools], None, FUNCTIONS))
    assert calls(read(reader, answer)) == [("get_weather", json.dumps(arguments))] and reader.complete
