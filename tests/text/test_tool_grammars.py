"""An answer of some form or calls: the grammar takes what models write, and all that it takes is read back."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tests.engine.grammars import Matcher
from tests.tiers import paired
from tokserve.base.errors import RequestError
from tokserve.features.chat import tool_grammars
from tokserve.features.chat.output_format import OutputFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.tool_formats import TOOL_FORMATS, named
from tokserve.features.grammar.grammar import Compiler
from tokserve.protocol.params import StructuredOutputs
from tokserve.text.tokenizer import Tokenizer

EOS = "<|im_end|>"
MARKERS = sorted({mark for form in TOOL_FORMATS for mark in form.markers()})
CITY = {"enum": ["Oslo", "Rome"]}
FUNCTIONS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "required": ["city", "when"],
        "properties": {
            "city": {"$ref": "#/$defs/City"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "when": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "now"}]},
        },
        "$defs": {"City": CITY},
    },
    "weathers": {
        "type": "object",
        "properties": {"cities": {"type": "array", "items": {"$ref": "#/definitions/City"}, "maxItems": 2}},
        "definitions": {"City": CITY},
    },
    "ping": {},
}
VERDICT = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}, "score": {"type": "integer", "enum": [1, 12]}},
    "required": ["right"],
    "additionalProperties": False,
}
WEATHER = '{"city": "Oslo", "days": 3, "when": true}'
CITIES = '{"cities": ["Rome"]}'
ELEMENTS = (
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=when>\ntrue\n</parameter>\n</function>",
    '<function=weathers>\n<parameter=cities>\n["Rome"]\n</parameter>\n</function>',
)


def object_call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


WRITTEN = {  # one call, and two
    "hermes": [
        f"<tool_call>\n{object_call('weather', WEATHER)}\n</tool_call>",
        f"<tool_call>\n{object_call('weather', WEATHER)}\n</tool_call>\n"
        f"<tool_call>\n{object_call('weathers', CITIES)}\n</tool_call>",
    ],
    "qwen3_coder": [
        f"<tool_call>\n{ELEMENTS[0]}\n</tool_call>",
        f"<tool_call>\n{ELEMENTS[0]}\n</tool_call>\n<tool_call>\n{ELEMENTS[1]}\n</tool_call>",
    ],
    "mistral": [
        f"[TOOL_CALLS]weather[ARGS]{WEATHER}",
        f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]weathers[ARGS]{CITIES}",
        f"[TOOL_CALLS] [{object_call('weather', WEATHER)}]",
        f"[TOOL_CALLS] [{object_call('weather', WEATHER)}, {object_call('weathers', CITIES)}]",
    ],
    "deepseek_v31": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WEATHER}"  # noqa: RUF001
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜>"  # noqa: RUF001
        f"<｜tool▁call▁begin｜>weathers<｜tool▁sep｜>{CITIES}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
    ],
    "llama3_json": [
        object_call("weather", WEATHER, "parameters"),
        f"{object_call('weather', WEATHER, 'parameters')}; {object_call('weathers', CITIES, 'parameters')}",
        f"<|python_tag|>{object_call('weather', WEATHER, 'parameters')}",
    ],
}
NAMES = list(WRITTEN)
ODD = "\"\\\x01\x08\x7f\u2028é🙂<'"
ANSWERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {  # the form, texts of it, and other texts
    "json": ({"json": VERDICT}, ['{"right": true}', '{ "right":false,\n"score": 12 }'], ['{"right": 1}', "Yes"]),
    "text": ({"json": json.dumps(VERDICT), "disable_any_whitespace": True}, ['{"right":true}'], ['{"right": true}']),
    "object": ({"json_object": True}, ["{}", '{"a": {"b": [1]}}'], ["[]", "1"]),
    "regex": ({"regex": r"[a-c]/\d\/{2}|\n"}, ["b/1//", "\n"], ["b1//"]),
    "choice": ({"choice": ["yes", "yes, sir", ODD]}, ["yes", "yes, sir", ODD], ["no"]),
    "ebnf": ({"grammar": 'root ::= "{" [x-z] "}"'}, ["{x}"], ["{x"]),
    "grammar": ({"grammar": 'start: a+ "}"\na: "{" | B\nB: /[x-z]/'}, ["{x}"], ["{x"]),
}


@cache
def backend(marks: str) -> Backend:
    """A byte-level BPE whose tokens run over the ends of what grammars are made of.  `marks`: are they tokens?"""
    grammar = Backend(models.BPE())
    grammar.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    grammar.decoder = decoders.ByteLevel()
    texts = [text for texts in WRITTEN.values() for text in texts]
    texts = [re.sub("|".join(map(re.escape, MARKERS)), "\n", text) for text in texts]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    grammar.train_from_iterator([text[i : i + 16] for text in texts for i in range(0, len(text), 5)], trainer)
    if marks != "text":
        grammar.add_tokens([AddedToken(mark, special=marks == "special", normalized=False) for mark in MARKERS])
    return grammar


@cache
def tokenizer(marks: str) -> Tokenizer:
    return Tokenizer(backend(marks), {}, None)


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiler]:
    grammar = {}
    for marks in ("text", "added", "special"):
        directory: Path = tmp_path_factory.mktemp(marks)
        backend(marks).save(str(directory / "tokenizer.json"))
        grammar[marks] = Compiler(str(directory), backend(marks).get_vocab_size(), [0])
    return grammar


def either(marks: str, form: str, answer: dict[str, Any], **options: Any) -> StructuredOutputs:
    functions = options.pop("functions", FUNCTIONS)
    grammar = tool_grammars.answer_or_calls(
        StructuredOutputs(**answer),
        named(TOOL_FORMATS, form),
        functions,
        tokenizer(marks),
        **({"max_calls": 16} | options),
    )
    grammar.validate()
    return grammar


def takes(compiler: Compiler, marks: str, form: str, answer: dict[str, Any], text: str, **options: Any) -> bool:
    return follows(compiler, marks, either(marks, form, answer, **options), text)


def follows(compiler: Compiler, marks: str, requested: StructuredOutputs, text: str) -> bool:
    grammar = Matcher(compiler.compile(requested), ends=True)
    try:
        for token in backend(marks).encode(text, add_special_tokens=False).ids:
            grammar.advance(token)
    except RequestError:
        return False
    return bool(grammar.bits[0] & 1)  # EOS


def calls(form: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls that are read."""
    content, actual = "", []
    for kind, part in Parser(OutputFormat(named(TOOL_FORMATS, form), functions=FUNCTIONS)).push(text, final=True):
        if kind == "call":
            actual.append((part, ""))
        elif kind == "arguments":
            actual[-1] = (actual[-1][0], actual[-1][1] + part)
        else:
            content += part
    return content, [(name, json.loads(arguments)) for name, arguments in actual]


@pytest.mark.parametrize(("form", "marks"), paired(NAMES, ["text", "added", "special"]))
def test_calls_are_taken_as_the_model_writes_them(compilers: dict[str, Compiler], form: str, marks: str) -> None:
    for text in WRITTEN[form]:
        expected = [("weather", json.loads(WEATHER)), ("weathers", json.loads(CITIES))]
        actual = calls(form, text)[1]
        assert actual == expected[: len(actual)] and actual
        assert takes(compilers[marks], marks, form, ANSWERS["json"][0], text), text
        assert takes(compilers[marks], marks, form, ANSWERS["json"][0], text, max_calls=1) == (len(actual) == 1), text
        for wrong in (text.replace('"Oslo"', '"Rom"').replace("\nOslo", "\nRom"), text.replace("weather", "water")):
            assert not takes(compilers[marks], marks, form, ANSWERS["json"][0], wrong), wrong
        assert not takes(compilers[marks], marks, form, ANSWERS["json"][0], '{"right": true}' + text)
        assert not takes(compilers[marks], marks, form, ANSWERS["json"][0], text[:-1])


@pytest.mark.some(12)
@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("form", NAMES)
def test_answers_of_every_form_are_taken(compilers: dict[str, Compiler], form: str, kind: str) -> None:
    answer, right, wrong = ANSWERS[kind]
    for marks in ("text", "added"):
        for text in right:
            assert takes(compilers[marks], marks, form, answer, text), text
        for text in wrong:
            assert not takes(compilers[marks], marks, form, answer, text), text
        call = WRITTEN[form][0]
        if (
            form == "llama3_json" and "disable_any_whitespace" in answer
        ):  # it is not yet decided which of them has begun
            call = json.dumps(json.loads(call), separators=(",", ":"))
        assert takes(compilers[marks], marks, form, answer, call)


@pytest.mark.parametrize(("form", "marks"), paired(NAMES, ["text", "special"]))
def test_texts_of_the_grammar_are_parsed_completely(compilers: dict[str, Compiler], form: str, marks: str) -> None:
    seen = set()
    for seed in range(20):
        grammar = Matcher(compilers[marks].compile(either(marks, form, {"json": VERDICT})), ends=True)
        chance, tokens = random.Random(seed), []
        while len(tokens) < 400:
            allowed = np.flatnonzero(np.unpackbits(grammar.bits.view(np.uint8), bitorder="little")).tolist()
            token = 0 if 0 in allowed else chance.choice(allowed)
            if token == 0:
                break
            tokens.append(token)
            grammar.advance(token)
        else:
            continue  # calls without end
        content, actual = calls(form, backend(marks).decode(tokens, skip_special_tokens=False))
        seen |= {name for name, _ in actual} or {"answer"}
        assert bool(content) != bool(actual)
        if content:
            assert json.loads(content).keys() <= {"right", "score"}
        for name, arguments in actual:
            properties = FUNCTIONS[name].get("properties", {})
            assert arguments.keys() <= properties.keys() and arguments.keys() >= set(
                FUNCTIONS[name].get("required", ())
            )
            assert arguments.get("city", "Rome") in ("Oslo", "Rome") and arguments.get("days", 1) in range(1, 10)
            assert arguments.get("when") in (True, False, None, "now")
            assert set(arguments.get("cities", ())) <= {"Oslo", "Rome"}
    assert len(seen) > 1, seen


ONE_CALL = {
    "hermes": '<tool_call>{"name": "cities", "arguments": {}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=cities>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "cities", "parameters": {}}',
}


@pytest.mark.parametrize("form", ONE_CALL)
def test_the_number_of_calls_after_content_is_limited(compilers: dict[str, Compiler], form: str) -> None:
    between = "; " if form == "llama3_json" else "\n"
    functions = {"cities": {"type": "object"}}
    for limit in (1, 2, 16):
        for count in (1, 2, 3, 16, 17):
            text = between.join([ONE_CALL[form]] * count)
            taken = takes(
                compilers["text"], "text", form, ANSWERS["json"][0], text, max_calls=limit, functions=functions
            )
            assert taken == (count <= limit), (limit, count)


def test_the_number_of_forced_calls_is_limited(compilers: dict[str, Compiler]) -> None:
    call = '{"name": "cities", "parameters": {}}'
    for limit in (1, 3, 16):
        grammar = tool_grammars.list_of_calls({"cities": {"type": "object"}}, max_calls=limit).plain()
        for count in (1, 3, 4, 16, 17):
            text = f"[{', '.join([call] * count)}]"
            assert follows(compilers["text"], "text", grammar, text) == (count <= limit), (limit, count)


@pytest.mark.parametrize(
    ("form", "marks"), paired([name for name in NAMES if name != "llama3_json"], ["text", "added", "special"])
)
def test_calls_within_any_text(compilers: dict[str, Compiler], form: str, marks: str) -> None:
    def takes_text(text: str, parallel: bool = True) -> bool:
        grammar = tool_grammars.text_or_calls(named(TOOL_FORMATS, form), FUNCTIONS, tokenizer(marks), parallel=parallel)
        return follows(compilers[marks], marks, grammar, text)

    other = "[ARGS]" if form in ("hermes", "qwen3_coder") else "</tool_call>"
    for call in WRITTEN[form]:
        several = len(calls(form, call)[1]) > 1
        for text in (call, f"Let me see: {{\n\n{call}", f"{other}é{call} ok {other}", f"{call} {call}"):
            assert takes_text(text), text
        if marks != "text":  # as text a second is not kept to, and not told
            assert takes_text(call, parallel=False) != several and not takes_text(f"{call} {call}", parallel=False)
        assert not takes_text(call.replace('"Oslo"', '"Rom"').replace("\nOslo", "\nRom"))
        assert not takes_text("a" + call.replace("weather", "water"))
        assert not takes_text(f"Yes {call[:20]}")
    for text in ("", "Hello <tool_cal", "{} [", f"a {other} b"):
        assert takes_text(text), text


STRINGS = {
    "type": "object",
    "required": ["a"],
    "additionalProperties": {"type": "string"},
    "properties": {
        "a": {"type": "string"},
        "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "c": {},
        "d": True,
        "e": {"$ref": "#/definitions/E"},
    },
    "definitions": {"E": {"type": ["string", "integer"]}},
}
ROUND = {"$ref": "#/$defs/A"}
FANNED = {str(i): {"anyOf": [{"$ref": f"#/$defs/{max(i - 1, 0)}"}] * 9 + [{"const": i}]} for i in range(30)}


def elements(**values: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        ({"a": "x < y\n\n</p>"}, True),
        ({"a": ""}, True),
        ({"a": "x", "b": "null", "c": "[", "d": "1", "e": "2"}, True),
        ({"a": "x", "other": "y", "more": "z"}, True),
        ({"b": "x"}, False),
        ({"b": "x", "a": "x"}, False),
    ],
)
def test_elements_that_may_be_strings_are_any_text(
    compilers: dict[str, Compiler], values: dict[str, str], taken: bool
) -> None:
    text, answer = elements(**values), {"json_object": True}
    assert takes(compilers["added"], "added", "qwen3_coder", answer, text, functions={"f": STRINGS}) == taken
    actual = takes(
        compilers["added"],
        "added",
        "qwen3_coder",
        answer,
        text,
        functions={"f": STRINGS | {"additionalProperties": False}},
    )
    assert actual == (taken and "other" not in values)


@pytest.mark.parametrize(
    ("form", "functions", "why"),
    [
        ("qwen3_coder", {"f": {"anyOf": [{}]}}, "anyOf"),
        ("qwen3_coder", {"f": {"properties": []}}, "properties"),
        ("qwen3_coder", {"f": {"properties": {"a": 5}}}, "not a JSON schema"),
        ("hermes", {"a b": {}}, None),
        ("qwen3_coder", {"f": {"\ud800": 1}}, "not a JSON schema"),
        ("qwen3_coder", {"f": {"properties": {"a b": {}}}}, "'a b'"),
        ("mistral", {"a b": {}}, "'a b'"),
        ("qwen3_coder", {"f": {"properties": {"a": {"$ref": "#/properties/a"}}}}, "#/properties/a"),
        ("qwen3_coder", {"f": {"properties": {"a": ROUND}, "$defs": {"A": ROUND}}}, "'a' of 'f'"),
        ("qwen3_coder", {"f": {"properties": {"a": ROUND}, "$defs": {"A": {"anyOf": [ROUND, {"const": 1}]}}}}, None),
        ("qwen3_coder", {"f": {"properties": {"a": {"$ref": "#/$defs/29"}}, "$defs": FANNED}}, None),
        *((form, {"f": {"properties": {"a": {"const": "x" * 70_000}}}}, "69632") for form in NAMES),
    ],
)
def test_what_cannot_be_put_in_a_grammar(form: str, functions: dict[str, Any], why: str | None) -> None:
    def make() -> StructuredOutputs:
        answer = StructuredOutputs(json_object=True)
        return tool_grammars.answer_or_calls(
            answer, named(TOOL_FORMATS, form), functions, tokenizer("text"), max_calls=16
        )

    if why is None:
        assert make().kind == "grammar"
        return
    with pytest.raises(tool_grammars.NotExpressible, match=re.escape(why)):
        make()
