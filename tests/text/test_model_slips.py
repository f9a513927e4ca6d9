"""What models write that is not quite a call (serving-faults F1, F5, F11, F13): what can be read is read as it was
meant, and what cannot is never said to be complete."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from tests.text.test_parsing import FORMATS, THOUGHTS, Said, add, call, content
from tests.tiers import slow_after
from tokserve.features.chat import parameters
from tokserve.features.chat.json_scanner import complete_members
from tokserve.features.chat.output_format import AnswerStart, OutputFormat
from tokserve.features.chat.parsing import Parser

STRING = {"type": "string"}
PROPERTIES: dict[str, Any] = {
    "path": STRING,
    "content": STRING,
    "tags": {"type": "array"},
    "cfg": {"properties": {"a": {"type": "integer"}}},
    "n": {"type": "integer"},
}
FUNCTIONS = {"write": {"type": "object", "properties": PROPERTIES}, "ping": {}}
ONE = '{"name": "write", "arguments": {"path": "p"}}'
PING = '{"name": "ping", "arguments": {}}'
Result = tuple[Said, list[bool]]


def parse(form: str, text: str, cuts: Any = (), thinking: str | None = None, **options: Any) -> Result:
    """What is read, and which calls are complete."""
    cut_off, start = options.pop("cut", False), options.pop("start", AnswerStart())
    thoughts = None if thinking is None else THOUGHTS[thinking]
    parser = Parser(OutputFormat(FORMATS[form], thoughts, FUNCTIONS), start, **options)
    pieces: Said = []
    for begin, end in pairwise([0, *cuts, len(text)]):
        for kind, piece in parser.push(text[begin:end]):
            add(pieces, kind, piece)
    for kind, piece in parser.push("", final=True, cut=cut_off):
        add(pieces, kind, piece)
    return pieces, parser.is_whole


def at_all_cuts(form: str, text: str, **options: Any) -> Result:
    """The result, which is the same however the text arrives."""
    result = parse(form, text, **options)
    for place in range(len(text) + 1):
        assert parse(form, text, [place], **options) == result, place
    assert parse(form, text, range(1, len(text)), **options) == result
    return result


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


def element(*parameters: str, name: str = "write") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


NOT_JSON = [
    '{"content": "print("hello")", "path": "a.py"}',
    '{"path": "p",}',
    "{'path': 'p'}",
    '{"n": NaN}',
    '{"path": "\\ud83c"}',
    '{"n": 1e400}',
    '{"path": "\\d"}',
    '{"path": "\\u12"}',
    "{path: 1}",
    '{"n": 01}',
    '{"n": [1, 2}',
    '{"a": ' + "[" * 300 + "]" * 300 + "}",
    '{"n": -}',
    '{"n": 1 2}',
    '{"n": tru}',
    '{"a" 1}',
    '{"n": ' + "9" * 5000 + "}",
    '{"path": "say "hi there"}',
]


@pytest.mark.parametrize("arguments", NOT_JSON, ids=lambda text: text[:20])
def test_arguments_that_are_not_json_are_handed_over_as_they_are_and_not_as_complete(arguments: str) -> None:
    text = f"Ok {hermes(arguments)} so {hermes('{}')}"
    pieces, is_whole = parse("hermes", text)
    assert [kind for kind, _ in pieces] == ["content", "call", "arguments", "content", "call", "arguments"]
    assert pieces[2][1].startswith(arguments) and is_whole == [False, True]
    assert parse("hermes", text, range(1, len(text))) == (pieces, is_whole)
    pieces, is_whole = parse("hermes", text, whole_calls=True)
    assert pieces == [("content", f"Ok {hermes(arguments)} so"), *call("write", "{}")] and is_whole == [True]
    assert parse("hermes", text, range(1, len(text)), whole_calls=True) == (pieces, is_whole)


@pytest.mark.parametrize("raw", ["line1\nline2", "a\tb\r\n", "\x00\x1f", "l\u2028\x7f"])
def test_raw_control_characters_in_strings_are_escaped(raw: str) -> None:
    for text in (hermes(f'{{"path": "{raw}", \n"n": 1}}'), hermes(f'{{"{raw}": ["{raw}"]}}')):
        pieces, is_whole = at_all_cuts("hermes", text)
        arguments = json.loads(pieces[1][1])
        assert is_whole == [True] and arguments in ({"path": raw, "n": 1}, {raw: [raw]})
    first, _ = parse("hermes", f'<tool_call>{{"arguments": {{"path": "{raw}"}}, "name": "write"}}</tool_call>')
    assert json.loads(first[1][1]) == {"path": raw}
    inner = json.dumps(f'{{"path": "{raw}"}}')
    as_text, _ = parse("hermes", f'<tool_call>{{"name": "write", "arguments": {inner}}}</tool_call>')
    assert json.loads(as_text[1][1]) == {"path": raw}
    values, _ = parse("qwen3_coder", element(parameter("cfg", f'{{"a": "{raw}"}}'), parameter("tags", f'["{raw}"]')))
    assert json.loads(values[1][1]) == {"cfg": {"a": raw}, "tags": [raw]}


WRITE_P = call("write", '{"path": "p"}')
UNCLOSED = "<function=write>\n<parameter=path>\np"
READ: list[tuple[str, str, Said]] = [
    # F5 a: no opener
    ("qwen3_coder", element(parameter("path", "p"))[len("<tool_call>\n") :], WRITE_P),
    ("qwen3_coder", "Ok.\n<function=write>\n<parameter=path>\np\n</parameter>\n</function>", content("Ok.") + WRITE_P),
    ("qwen3_coder", "Use <function=f> or <function=write> so", content("Use <function=f> or <function=write> so")),
    # b: an end tag inside a value
    (
        "qwen3_coder",
        element(parameter("content", "ends with </parameter> here."), parameter("path", "p")),
        call("write", '{"content": "ends with </parameter> here.", "path": "p"}'),
    ),
    # c: no end of the function
    ("qwen3_coder", element(parameter("path", "p")).replace("</function>\n", ""), WRITE_P),
    ("qwen3_coder", "<tool_call><function=ping></tool_call>", call("ping", "{}")),
    # d: no end of a parameter, before the next one and before the function's end
    (
        "qwen3_coder",
        element("<parameter=path>\np\n", parameter("content", "c")),
        call("write", '{"path": "p", "content": "c"}'),
    ),
    ("qwen3_coder", element("<parameter=path>\np\n"), WRITE_P),
    # and before the end of all calls, where another call follows
    ("qwen3_coder", f"<tool_call>\n{UNCLOSED}\n</tool_call>\n{element(parameter('path', 'p'))}", WRITE_P * 2),
    (
        "qwen3_coder",
        f"<tool_call>\n{UNCLOSED}</tool_call><tool_call><function=ping></tool_call>",
        WRITE_P + call("ping", "{}"),
    ),
    (
        "qwen3_coder",
        element(parameter("content", "a\n</tool_call>\n<tool_call>\nb"), parameter("path", "p")),
        call("write", '{"content": "a\\n</tool_call>\\n<tool_call>\\nb", "path": "p"}'),
    ),
    (
        "qwen3_coder",
        element(parameter("path", "a\n<parameter=path>\n<parameter=other>\nb\n</function>\nc")),
        call("write", '{"path": "a\\n<parameter=path>\\n<parameter=other>\\nb\\n</function>\\nc"}'),
    ),
    # e, f: values in Python's notation; an object that is not said to be one
    (
        "qwen3_coder",
        element(parameter("tags", "['python', 'x']"), parameter("cfg", "{'b': True}")),
        call("write", '{"tags": ["python", "x"], "cfg": {"b": true}}'),
    ),
    ("qwen3_coder", element(parameter("cfg", '{"a": 5}')), call("write", '{"cfg": {"a": 5}}')),
    # g: two functions in one
    ("qwen3_coder", element(parameter("path", "p") + "</function>\n<function=ping>\n"), WRITE_P + call("ping", "{}")),
    ("qwen3_coder", element(parameter("path", "p") + "<function=ping>\n"), WRITE_P + call("ping", "{}")),
    # h: white space and quotes in tags
    ("qwen3_coder", element("<parameter=path >\np\n</parameter>\n"), WRITE_P),
    ("qwen3_coder", element('<parameter="path">\np\n</parameter>\n', name="'write' "), WRITE_P),
    # F13
    ("hermes", f"<tool_call>\n{ONE}}}\n</tool_call>", WRITE_P),
    ("hermes", f"<tool_call>\n{ONE}\n{PING}\n</tool_call> B", WRITE_P + call("ping", "{}") + content("B")),
    ("hermes", f"<tool_call>\n{ONE},\n{PING}\n</tool_call>", WRITE_P + call("ping", "{}")),
    ("hermes", f"<tool_call>[{ONE},]</tool_call>", WRITE_P),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_ca", WRITE_P),
    ("hermes", f"<tool_call>\n{ONE}}} B", WRITE_P + content("} B")),
    ("hermes", f'<tool_call>\n{ONE}\n{{"x": 1}}', WRITE_P + content('{"x": 1}')),
    ("hermes", '<tool_call>{"name": "ping", "arguments": ""}</tool_call>', call("ping", "{}")),
    ("hermes", '<tool_call>{"id": 1, "name": "write", "arguments": {"path": "p"}}</tool_call>', WRITE_P),
    ("hermes", '<tool_call>{"index": 0, "id": null, "name": "ping", "arguments": {}}</tool_call>', call("ping", "{}")),
    ("mistral", f"[TOOL_CALLS] [{ONE},]", WRITE_P),
    ("mistral", f"[TOOL_CALLS] [{ONE}]]", WRITE_P),
    ("mistral", '[TOOL_CALLS]write[ARGS]{"path": "p"}}', WRITE_P),
    ("mistral", '[TOOL_CALLS]write[ARGS]{"path": "p"} ] so', WRITE_P + content("] so")),
    ("llama3_json", f"{ONE}, {PING}", WRITE_P + call("ping", "{}")),
    ("llama3_json", f"[{ONE}, {PING}]", WRITE_P + call("ping", "{}")),
    ("llama3_json", f"<|python_tag|>{ONE}; {PING}", WRITE_P + call("ping", "{}")),
]


@pytest.mark.some(20)
@pytest.mark.parametrize(("form", "text", "pieces"), READ)
def test_what_can_be_read_is_read_as_it_was_meant(form: str, text: str, pieces: Said) -> None:
    num_calls = sum(kind == "call" for kind, _ in pieces)
    for whole_calls in (False, True):
        assert at_all_cuts(form, text, whole_calls=whole_calls) == (pieces, [True] * num_calls)


BEGUN = [
    ("hermes", hermes('{"path": "p", "n": 12'), '{"path": "p", "n": 12'),
    ("hermes", hermes('{"path": "\\u12'), '{"path": "\\u12'),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=path>\np\n</para", '{"path": "p'),
    ("mistral", '[TOOL_CALLS]write[ARGS]{"path": "p', '{"path": "p'),
    ("llama3_json", '{"name": "write", "parameters": {"path": "p', '{"path": "p'),
]


@pytest.mark.parametrize(("form", "text", "arguments"), BEGUN)
def test_a_call_that_is_cut_off_is_not_complete(form: str, text: str, arguments: str) -> None:
    text = text.removesuffix("}\n</tool_call>")
    partial = call("write", arguments), [False]
    assert at_all_cuts(form, text) == partial
    assert at_all_cuts(form, text, whole_calls=True, cut=True) == partial  # by max_tokens, which the reply says
    assert at_all_cuts(form, text, whole_calls=True) == (content(text), [])


THOUGHT_CALLS: list[tuple[str, str, Said]] = [
    ("hermes", f"I should call <tool_call>{ONE}</tool_call>", [("reasoning", "I should call"), *WRITE_P]),
    (
        "hermes",
        f"So\n<tool_call>{ONE}</tool_call>\n<tool_call>{PING}</tool_call>\n",
        [("reasoning", "So"), *WRITE_P, *call("ping", "{}")],
    ),
    (
        "qwen3_coder",
        "So\n<function=write>\n<parameter=path>\np\n</parameter>\n</function>",
        [("reasoning", "So"), *WRITE_P],
    ),
    ("mistral", '[TOOL_CALLS]write[ARGS]{"path": "p"}', WRITE_P),
    # no calls: the thought goes on, or ends, or the call does not
    ("hermes", f"a <tool_call>{ONE}</tool_call> b", [("reasoning", f"a <tool_call>{ONE}</tool_call> b")]),
    (
        "hermes",
        f"a <tool_call>{ONE}</tool_call> </think>b",
        [("reasoning", f"a <tool_call>{ONE}</tool_call>"), *content("b")],
    ),
    ("hermes", f"a <tool_call>{ONE[:-4]}</think>b", [("reasoning", f"a <tool_call>{ONE[:-4]}"), *content("b")]),
    ("hermes", f"a <tool_call>{ONE[:-4]}", [("reasoning", f"a <tool_call>{ONE[:-4]}")]),
    ("hermes", f"a <tool_call> b <tool_call>{ONE}</tool_call>", [("reasoning", "a <tool_call> b"), *WRITE_P]),
    ("llama3_json", f"a {ONE}", [("reasoning", f"a {ONE}")]),
]


@pytest.mark.parametrize(("form", "text", "pieces"), THOUGHT_CALLS)
def test_calls_at_the_end_of_a_thought_that_does_not_end(form: str, text: str, pieces: Said) -> None:
    """F11."""
    num_calls = sum(kind == "call" for kind, _ in pieces)
    for whole_calls in (False, True):
        result = at_all_cuts(form, f"<think>\n{text}", thinking="qwen3", whole_calls=whole_calls)
        assert result == (pieces, [True] * num_calls)


def test_thoughts_after_a_thought_and_after_calls() -> None:
    text = f"<think>a</think>\n<think>b</think>\n<tool_call>{ONE}</tool_call>\n<think>\nc\n</think>\n\nfin <think>d"
    expected: Said = [("reasoning", "ab"), *WRITE_P, ("reasoning", "c"), ("content", "fin <think>d")]
    assert at_all_cuts("hermes", text, thinking="qwen3") == (expected, [True])


def test_a_thought_that_the_prompt_has_begun_keeps_its_white_space() -> None:
    for continued, thought in ((True, " a greeting."), (False, "a greeting.")):
        pieces, _ = parse(
            "hermes", " a greeting.\n</think>\n\nHello", thinking="qwen3", start=AnswerStart(True, continued)
        )
        assert pieces == [("reasoning", thought), ("content", "Hello")]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "array"}, "['a', \"b\", None, 1.5]", '["a", "b", null, 1.5]'),
        ({"type": "array"}, "['a'", "\"['a'\""),
        ({"type": "object"}, "{'a': (1, 2)}", "\"{'a': (1, 2)}\""),
        ({"type": "object"}, "{1: 2}", '"{1: 2}"'),
        ({"type": "object"}, "{'a': 1e999}", "\"{'a': 1e999}\""),
        ({"type": "array"}, "{'a': 1}", "\"{'a': 1}\""),
        ({"type": "array"}, "['\\d']", "\"['\\\\d']\""),
        ({"type": "array"}, "[" * 5000, f'"{"[" * 5000}"'),
        ({"type": "array"}, "[f()]", '"[f()]"'),
        ({"items": {}}, "[1]", "[1]"),
        ({"items": {}}, "a", '"a"'),
        ({"minimum": 0}, "5", "5"),
        ({"anyOf": [{"properties": {}}, {"type": "null"}]}, "{'a': 1}", '{"a": 1}'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_in_pythons_notation(schema: dict[str, Any], text: str, value: str) -> None:
    assert not parameters.is_text(schema) and parameters.json_of(text, schema) == value


# what holds for whatever a model writes


def readable(arguments: str) -> Any:
    """What a strict client reads: no NaN, no lone surrogate, no infinite number."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    value = json.loads(arguments, parse_constant=refuse)
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    assert isinstance(value, dict)
    return value


def written(rng: random.Random, form: str) -> tuple[str, list[Any]]:
    """Calls as a model writes them, and their arguments."""
    values = ["p", "a\nb", 'say "hi"', "\\d", "</tool_call>", "</parameter>", "é\u2028", 5, -1.5e3, None, True, [1, {}]]
    texts, arguments = [], []
    for _ in range(rng.randrange(1, 3)):
        chosen = {key: rng.choice(values) for key in rng.sample(["path", "content", "n", "x y"], rng.randrange(3))}
        as_json = json.dumps(chosen, ensure_ascii=rng.random() < 0.5)
        key = "parameters" if form == "llama3_json" else "arguments"
        as_object = f'{{"name": "write", "{key}": {as_json}}}'
        texts.append(
            {
                "hermes": f"<tool_call>\n{as_object}\n</tool_call>",
                "llama3_json": as_object + ";",
                "mistral": f"[TOOL_CALLS]write[ARGS]{as_json}",
                "deepseek_v31": f"<｜tool▁call▁begin｜>write<｜tool▁sep｜>{as_json}<｜tool▁call▁end｜>",  # noqa: RUF001
            }[form]
        )
        arguments.append(chosen)
    return "".join(texts), arguments


MUTATIONS = [*"\"\\{}[],:\n\t'x1", "NaN", "\\ud83c", "\\u", "1e400", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "é"]


@pytest.mark.slow
def test_of_mutated_calls_none_is_said_to_be_complete_but_with_what_the_model_wrote() -> None:
    """F1: a call that is complete has the object that was written, or JSON at least if it was changed; the others are
    no calls, or not complete; and it does not matter how the text arrives."""
    rng = random.Random(5)
    for _ in range(1500):
        form = rng.choice(["hermes", "llama3_json", "mistral", "deepseek_v31"])
        text, arguments = written(rng, form)
        num_changes = rng.choice([0, 1, 1, 2, 3])
        for _ in range(num_changes):
            place, kind = rng.randrange(len(text)), rng.random()
            if kind < 0.3:
                text = text[:place] + text[place + 1 :]
            elif kind < 0.4:
                text = text[:place]
            else:
                text = text[:place] + rng.choice(MUTATIONS) + text[place:]
            text = text or "x"
        whole_calls = rng.random() < 0.5
        options: dict[str, Any] = {"whole_calls": whole_calls, "thinking": rng.choice([None, "qwen3"])}
        pieces, is_whole = result = parse(form, text, **options)
        assert parse(form, text, sorted(rng.choices(range(len(text) + 1), k=5)), **options) == result, (text, form)
        assert parse(form, text, range(1, len(text)), **options) == result, (text, form)
        calls = [index for index, (kind, _) in enumerate(pieces) if kind == "call"]
        assert len(calls) == len(is_whole)
        read = [pieces[index + 1][1] if pieces[index + 1 : index + 2] else "" for index in calls]
        for one, is_complete in zip(read, is_whole, strict=True):
            if is_complete:
                readable(one)
            else:
                assert not whole_calls
                with pytest.raises((ValueError, UnicodeError)):
                    readable(one)
        if not num_changes:
            assert [json.loads(one) for one in read] == arguments and all(is_whole), (text, pieces)
        if whole_calls and not calls and form != "deepseek_v31":
            assert "".join(piece for _, piece in pieces) == text or options["thinking"]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("form", "piece"),
    [
        ("hermes", '<tool_call>{"name": "write", "arguments": {"path": "'),
        ("hermes", f"<tool_call>{ONE}}}"),
        ("hermes", '<tool_call>{"name": "write", "arguments": {x"'),
        ("qwen3_coder", "<function=write><parameter=path>"),
        ("qwen3_coder", "\n<parameter=n>\n</parameter>"),
        ("mistral", '[TOOL_CALLS]write[ARGS]{"path": "\\'),
    ],
)
@pytest.mark.parametrize("thinking", slow_after(["qwen3", None], 1))
def test_slips_are_read_in_linear_time(form: str, piece: str, thinking: str | None) -> None:
    text = ("<think>" if thinking else "") + piece * 4000
    for whole_calls in (False, True):
        pieces, _ = parse(form, text, thinking=thinking, whole_calls=whole_calls)
        assert pieces


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ('{"n": 1', {}),
        ('{"n": 1, "m": 2', {"n": 1}),
        ('{"n": 1,', {"n": 1}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": "x", "b', {"a": "x"}),
        ('{"a": "x", "b"', {"a": "x"}),
        ('{"a": "x", "b": "y', {"a": "x"}),
        ('{"l": ["x", "y', {}),
        ('{"l": ["x", "y"', {}),
        ('{"l": ["x", "y"]', {"l": ["x", "y"]}),
        ('{"o": {"a": 1, "b": "q', {}),
        ('{"a": true', {"a": True}),
        ('{"a": tru', {}),
        ('{"a": "x,{", "b": [1', {"a": "x,{"}),
        ("{", {}),
        ("", {}),
    ],
)
def test_of_arguments_that_are_cut_off_the_complete_members_stay(text: str, members: dict[str, object]) -> None:
    assert complete_members(text) == members
