"""Text to content, reasoning and calls: what is emitted, and that it does not depend on the cuts."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from tokserve.features.chat import parameters
from tokserve.features.chat.output_format import AnswerStart, OutputFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.tool_formats import FORCED, THINKING, TOOL_FORMATS

FORMATS = {form.name: form for form in (*TOOL_FORMATS, FORCED)}
THOUGHTS = {thinking.name: thinking for thinking in THINKING}
PROPERTIES = {
    "a": {"type": "string"},
    "n": {"type": "integer"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "e": {"enum": ["1", "on"]},
    "m": {"type": ["string", "null"]},
    "odd": {"enum": 5},
    "even": "no schema",
    "k": {"const": 5},
    "l": {"const": "5"},
}
FUNCTIONS = {"f": {"type": "object", "properties": PROPERTIES}, "g": {}}
Said = list[tuple[str, str]]


def parser(
    form: str | None = None,
    thinking: str | None = None,
    *,
    inside: bool = False,
    whole_calls: bool = False,
    **more: Any,
) -> Parser:
    thoughts = None if thinking is None else THOUGHTS[thinking]
    output_format = OutputFormat(FORMATS[form] if form else None, thoughts, FUNCTIONS, **more)
    return Parser(output_format, AnswerStart(inside), whole_calls=whole_calls)


def read(one: Parser, text: str, cuts: Iterable[int] = ()) -> Said:
    """What is said, in order; pieces of a kind are joined."""
    pieces: Said = []
    places = [0, *cuts, len(text)]
    for begin, end in pairwise(places):
        for kind, piece in one.push(text[begin:end]):
            add(pieces, kind, piece)
    for kind, piece in one.push("", final=True):
        add(pieces, kind, piece)
    return pieces


def add(pieces: Said, kind: str, piece: str) -> None:
    if kind != "call" and pieces and pieces[-1][0] == kind:
        piece = pieces.pop()[1] + piece
    pieces.append((kind, piece))


def call(name: str, arguments: str) -> Said:
    return [("call", name), ("arguments", arguments)]


def content(text: str) -> Said:
    return [("content", text)]


ONE = '{"name": "f", "arguments": {"a": "x"}}'
DEEPSEEK = (
    "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # noqa: RUF001
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
)
CASES: list[tuple[str, str, Said]] = [
    # calls
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", call("f", '{"a": "x"}')),
    ("hermes", f"Let me.\n\n<tool_call>{ONE}</tool_call>\n", content("Let me.") + call("f", '{"a": "x"}')),
    ("hermes", f"<tool_call>{ONE}</tool_call>\n<tool_call>\n{ONE}\n</tool_call>", call("f", '{"a": "x"}') * 2),
    ("hermes", f"A <tool_call>{ONE}</tool_call> B", content("A") + call("f", '{"a": "x"}') + content(" B")),
    ("hermes", f"<tool_call>{ONE}</tool_call> B ", call("f", '{"a": "x"}') + content("B ")),
    ("hermes", '<tool_call>{"arguments": {"q": [1, "}"]}, "name": "h"}</tool_call>', call("h", '{"q": [1, "}"]}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call("f", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f", "{}")),
    ("hermes", '<tool_call>{"id": "1", "name": "f", "type": "function"}</tool_call>', call("f", "{}")),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}, {"name": "g", "arguments": {}}]',
        call("f", "{}") + call("g", "{}"),
    ),
    (
        "mistral",
        'Ok. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}',
        content("Ok.") + call("f", '{"a": 1}') + call("g", '{"b": 2}'),
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]9a9a9a9a9[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]b[ARGS]{}',
        call("f", '{"a": 1}') + call("g", "{}"),
    ),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]b[ARGS] no", content("[TOOL_CALLS]f[CALL_ID]b[ARGS] no")),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        call("f", '{"a": 1}') + call("g", "{}"),
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', call("f", "{}")),
    ("deepseek_v31", DEEPSEEK, content("Yes.") + call("f", "{}") + call("g", "{}")),
    (
        "forced",
        '[{"name": "f", "parameters": {"a": 1}}, {"name":"g","parameters":{}}]',
        call("f", '{"a": 1}') + call("g", "{}"),
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=f>\n<parameter=a>\nl1\nsay "5"\\\n</parameter>\n<parameter=n>\n5\n</parameter>\n'
        '<parameter=b>True</parameter><parameter=o>{"x": [1]}</parameter><parameter=e>1</parameter>'
        "<parameter=m>null</parameter><parameter=new>1</parameter><parameter=odd>2</parameter><parameter=even>2</parameter>"
        "<parameter=k>5</parameter><parameter=l>5</parameter></function>\n</tool_call>",
        call(
            "f",
            '{"a": "l1\\nsay \\"5\\"\\\\", "n": 5, "b": true, "o": {"x": [1]}, "e": "1", "m": null, "new": "1", '
            '"odd": 2, "even": "2", "k": 5, "l": "5"}',
        ),
    ),
    ("qwen3_coder", "<tool_call><function=f></function></tool_call>", call("f", "{}")),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>five</parameter></function>", call("f", '{"n": "five"}')),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=m>5</parameter><parameter=b>False</parameter></function>",
        call("f", '{"m": "5", "b": false}'),
    ),
    ("qwen3_coder", "<tool_call><function=h><parameter=a>1</parameter></function>", call("h", '{"a": "1"}')),
    ("forced", '[{"name":"f","parameters":{}},{"name":"g","parameters":{}}]', call("f", "{}") + call("g", "{}")),
    ("hermes", f"<tool_call>{ONE} B", call("f", '{"a": "x"}') + content("B")),
    ("hermes", f"A <tool_call>{ONE} B", content("A") + call("f", '{"a": "x"}') + content(" B")),
    # markers inside arguments
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\"<tool_call>"}}</tool_call>',
        call("f", '{"a": "</tool_call>\\"<tool_call>"}'),
    ),
    # no calls
    ("hermes", " a <tool_c b <tool_call", content(" a <tool_c b <tool_call")),
    ("hermes", "a <tool_call> b", content("a <tool_call> b")),
    ("hermes", '<tool_call>f{"a": 1}</tool_call>', content('<tool_call>f{"a": 1}</tool_call>')),
    ("hermes", f"a <tool_call> <tool_call>{ONE}</tool_call>", content("a <tool_call>") + call("f", '{"a": "x"}')),
    ("hermes", '<tool_call>{"name": "f", "why": 1}', content('<tool_call>{"name": "f", "why": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arg', content('<tool_call>{"name": "f", "arg')),
    ("hermes", "", []),
    ("hermes", f'<tool_call> {{"name": "a<tool_call>{ONE}', content(f'<tool_call> {{"name": "a<tool_call>{ONE}')),
    ("mistral", "[TOOL_CALLS]maybe not", content("[TOOL_CALLS]maybe not")),
    ("llama3_json", '{"name": "Bob", "parameters": {"a": 1}}', content('{"name": "Bob", "parameters": {"a": 1}}')),
    ("llama3_json", '{"answer": 5}', content('{"answer": 5}')),
    ("llama3_json", 'It is {"name": "f", "parameters": {}}', content('It is {"name": "f", "parameters": {}}')),
    ("qwen3_coder", f"<tool_call>{ONE}</tool_call>", content(f"<tool_call>{ONE}</tool_call>")),
    ("qwen3_coder", "<tool_call><function=f><parameter", content("<tool_call><function=f><parameter")),
    *(
        ("hermes", text, content(text))
        for text in (
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\ud800", "arguments": {}}',
        )
    ),
    ("qwen3_coder", "<tool_call><function=></function>", content("<tool_call><function=></function>")),
    ("qwen3_coder", "<tool_call><function=f><parameter=>1", content("<tool_call><function=f><parameter=>1")),
    ("qwen3_coder", "<tool_call><function=f>oh</tool_call>", content("<tool_call><function=f>oh</tool_call>")),
    # calls that go wrong after they were told, and one that lacks its last brace
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}} oh', call("f", "{}") + content("oh")),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=n>5</parameter><parameter=>1</parameter></tool_call> B",
        call("f", '{"n": 5') + content("B"),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=n>5</parameter>oh</tool_call> B",
        call("f", '{"n": ') + content("B"),
    ),
    ("qwen3_coder", "<tool_call><function=f><parameter=n>5", call("f", '{"n": ')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', call("f", '{"a": [1')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oh} x</tool_call> B', call("f", "{}") + content("B")),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{}}, <tool_call>{ONE}',
        call("f", "{}") + call("f", '{"a": "x"}'),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', call("f", "{}")),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>\nlong", call("f", '{"a": "long')),
]


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
OPTIONAL = {"anyOf": [{"type": "boolean"}, {"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # what a schema allows is told apart from what only looks like JSON
        (NULLABLE, "0049123", '"0049123"'),
        (NULLABLE, "12345", '"12345"'),
        (NULLABLE, '{"a": 1}', '"{\\"a\\": 1}"'),
        (NULLABLE, "null", "null"),
        (NULLABLE, "true", '"true"'),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5.5", '"5.5"'),
        ({"type": ["string", "array"]}, "[1]", "[1]"),
        ({"type": "integer"}, "5.0", "5.0"),
        ({"type": "integer"}, "5.5", '"5.5"'),
        ({"type": "number"}, "5", "5"),
        ({"oneOf": [{"enum": ["a", 1]}, {"const": None}]}, "2", "2"),
        ({"enum": ["a", "b"]}, "2", '"2"'),
        ({"$ref": "#/$defs/x"}, "5", "5"),
        ({"allOf": [{"type": "string"}]}, "5", '"5"'),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
        ({"anyOf": [True]}, "5", "5"),
        ({"anyOf": [{"type": "string"}] * 1000}, "5", "5"),
        ({"anyOf": []}, "5", '"5"'),
        # values as Python writes them
        (NULLABLE, "None", "null"),
        (OPTIONAL, "None", "null"),
        (OPTIONAL, "True", "true"),
        (OPTIONAL, "False", "false"),
        (NULLABLE, "True", '"True"'),
        ({"type": "boolean"}, "TRUE", "true"),
        ({"type": "null"}, " None\n", "null"),
        (OPTIONAL, "none", '"none"'),
        (OPTIONAL, "7", "7"),
        (OPTIONAL, "seven", '"seven"'),
    ],
)
def test_a_parameter_has_a_type_that_its_schema_allows(schema: dict[str, Any], text: str, value: str) -> None:
    assert not parameters.is_text(schema) and parameters.json_of(text, schema) == value


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/Level"}, "1", '"1"'),
        ({"$ref": "#/$defs/Level", "default": "2"}, "true", '"true"'),
        ({"allOf": [{"$ref": "#/$defs/Level"}]}, "1", '"1"'),
        ({"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]}, "1", '"1"'),
        ({"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]}, "null", "null"),
        ({"$ref": "#/$defs/a~1b"}, "5", '"5"'),
        ({"$ref": "#/$defs/Count"}, "5", "5"),
        ({"$ref": "#/$defs/Tree"}, '{"left": null}', '{"left": null}'),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/Branching"}] * 3}, "5", "5"),
        ({"$ref": "#/$defs/Nowhere"}, "5", "5"),
        ({"$ref": "other.json#/x"}, "5", "5"),
    ],
)
def test_references_in_a_functions_schema_say_what_a_parameter_is(schema: Any, text: str, value: str) -> None:
    loop = {"$ref": "#/$defs/Loop"}
    definitions = {
        "Level": {"type": "string", "enum": ["1", "2", "true"], "title": "Level"},
        "a/b": {"type": "string"},
        "Count": {"type": "integer"},
        "Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}},
        "Loop": loop,
        "Branching": {"anyOf": [{"$ref": "#/$defs/Branching"}] * 100},
    }
    function = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    for form, call_text in (
        ("qwen3_coder", f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>"),
        ("glm45", f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"),
    ):
        for root in (function, {"$ref": "#/$defs/All", "$defs": definitions | {"All": {"properties": {"a": schema}}}}):
            reader = Parser(OutputFormat(FORMATS[form], functions={"f": root}), AnswerStart())
            assert read(reader, call_text) == call("f", f'{{"a": {value}}}')


@pytest.mark.parametrize(("form", "text", "pieces"), CASES)
def test_calls_and_text_that_resembles_calls(form: str, text: str, pieces: Said) -> None:
    assert read(parser(form), text) == pieces
    for place in range(len(text) + 1):
        assert read(parser(form), text, [place]) == pieces, place
    assert read(parser(form), text, range(1, len(text))) == pieces


THOUGHT: list[tuple[str, bool, str, Said]] = [
    ("qwen3", False, "<think>\nhm\n</think>\n\nYes.", [("reasoning", "hm"), *content("Yes.")]),
    ("qwen3", False, "Yes <think>no</think>", content("Yes <think>no</think>")),
    ("qwen3", True, "hm </thin </think>Yes", [("reasoning", "hm </thin"), *content("Yes")]),
    ("qwen3", True, "<think>hm</think>", [("reasoning", "hm")]),
    ("qwen3", True, "cut ", [("reasoning", "cut ")]),
    ("qwen3", False, "<think></think>\n ", []),
    (
        "qwen3",
        False,
        f"<think>\n<tool_call>\n</think>\n\n<tool_call>{ONE}</tool_call>",
        [("reasoning", "<tool_call>"), *call("f", '{"a": "x"}')],
    ),
    ("mistral", False, "[THINK]hm[/THINK]Yes", [("reasoning", "hm"), *content("Yes")]),
]


@pytest.mark.parametrize(("thinking", "inside", "text", "pieces"), THOUGHT)
def test_reasoning(thinking: str, inside: bool, text: str, pieces: Said) -> None:
    make = lambda: parser("hermes", thinking, inside=inside)  # noqa: E731
    for place in range(len(text) + 1):
        assert read(make(), text, [place]) == pieces, place
    assert read(make(), text, range(1, len(text))) == pieces


def test_unambiguous_text_is_emitted_at_once() -> None:
    one = parser("hermes")
    assert one.push("Let me <") == [("content", "Let me")]
    assert one.push("b> see. <tool_call>") == [("content", " <b> see.")]
    assert one.push('\n{"name": "f", "argum') == []
    assert one.push('ents": {"a": ') == [("call", "f"), ("arguments", '{"a": ')] and not one.complete
    assert one.push('"x') == [("arguments", '"x')]
    assert one.push('"}}\n</to') == [("arguments", '"}')] and one.complete and one.num_calls == 1
    assert one.push("ol_call>", final=True) == []
    values = parser("qwen3_coder")
    assert values.push("<tool_call><function=f><parameter=a>\nab\n")[-1] == ("arguments", "ab")
    assert values.push("c</par") == [("arguments", "\\nc")]


def test_one_call_only() -> None:
    text = f"<tool_call>{ONE}</tool_call>" * 3 + " B"
    one = parser("hermes", max_calls=1)
    assert read(one, text) == [*call("f", '{"a": "x"}'), *content("B")] and one.num_calls == 3
    two = parser("hermes", max_calls=2)
    assert read(two, text) == [*call("f", '{"a": "x"}') * 2, *content("B")] and two.num_calls == 3


def test_a_named_functions_arguments_are_the_whole_answer() -> None:
    assert read(parser(named="f"), '{"a": "<tool_call>"}') == call("f", '{"a": "<tool_call>"}')
    cut = parser(named="f")
    assert read(cut, '{"a": ') == call("f", '{"a": ') and not cut.complete
    assert read(parser(named="f"), "no") == content("no") and read(parser(named="f"), "") == []


def test_no_two_markers_can_overlap() -> None:
    for form in FORMATS.values():
        for thinking in (None, *THINKING):
            if form.body == "channels" or (thinking and thinking.channels):  # whose reader has markers of its own
                continue
            markers = OutputFormat(form, thinking).markers()
            firsts = {marker[0] for marker in markers}
            assert not any(first in marker[1:] for first in firsts for marker in markers), (form.name, markers)
            assert len(set(markers)) == len(markers)


HOSTILE = [
    ('<tool_call>{"arguments": {"a": "', ""),
    ('<tool_call>{"name": "', ""),
    ("x<tool_call>\n", ""),
    ('<tool_call>{"arguments": {', "}" * 40_000),
]


@pytest.mark.some(2)
@pytest.mark.parametrize(("piece", "end"), HOSTILE)
def test_parsing_takes_linear_time(piece: str, end: str) -> None:
    """What any client may send to derender: minutes, if what turned out to be no call were read anew."""
    text = piece * 20_000 + end
    assert "".join(text for _, text in parser("hermes").push(text, final=True)) == text


ATOMS = [
    *{marker for form in FORMATS.values() for marker in form.markers()},
    "<think>",
    "</think>",
    "<function=f>",
    "</function>",
    "\n<parameter=n>",
    "\n</function>",
    "<parameter=a>",
    "<parameter=n>",
    "</parameter>",
    *'{}[]"\\:,; \nx1',
    "  \n",
    "é漢",
    "null",
    "\u00a0",
    ONE,
    '{"name": "f", "parameters": {"a": "<tool_call>"}}',
    '{"arguments": {"q": [1, "}"]}, "name": "g"}',
    '{"name": "f", "arg',
    '"name"',
    '"arguments"',
    '"f"',
    '"id": "1", ',
    "<tool",
    "</para",
    "</think",
]


def test_the_parse_does_not_depend_on_the_cuts() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(sorted(ATOMS), k=rng.randrange(1, 14)))
        form, thinking = rng.choice([None, *FORMATS]), rng.choice([None, None, *THOUGHTS])
        inside = thinking is not None and rng.random() < 0.3
        more: dict[str, Any] = {
            "max_calls": rng.choice([None, None, None, 1, 2]),
            "named": None if form else rng.choice([None, "f"]),
            "exact": rng.random() < 0.2,
            "whole_calls": rng.random() < 0.5,
        }
        uncut, cut = (parser(form, thinking, inside=inside, **more) for _ in range(2))
        cuts = range(1, len(text)) if rng.random() < 0.3 else sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = read(uncut, text)
        assert read(cut, text, cuts) == pieces, (text, form, thinking, inside, more, cuts)
        assert (cut.num_calls, cut.complete) == (uncut.num_calls, uncut.complete)
        says_all = form is None or not (FORMATS[form].frames or FORMATS[form].body == "channels")
        if not uncut.num_begun and thinking is None and says_all:  # frames and headers are not reported
            assert "".join(piece for _, piece in pieces) == text
