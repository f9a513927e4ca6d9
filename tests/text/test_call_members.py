"""The arguments of calls in notations of their own: the grammar takes the properties that the schema demands and
allows, by name and number, as a grammar of JSON does, and their values as their types say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.test_tool_grammars import backend, follows, tokenizer
from tokserve.features.chat import tool_grammars
from tokserve.features.chat.tool_formats import TOOL_FORMATS, named
from tokserve.features.grammar.grammar import Compiler

DSML = "｜DSML｜"  # noqa: RUF001
NAMES = "abcz"  # the last is not among the properties
INTEGERS: dict[str, Any] = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}}
Call = dict[str, int | str | None]


def _elements(call: Call) -> str:
    inner = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in call.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


def _typed(call: Call) -> str:
    inner = ""
    for key, value in call.items():
        tag = f'{DSML}parameter name="{key}" string="{json.dumps(isinstance(value, str))}"'
        inner += f"<{tag}>{_plain(value)}</{DSML}parameter>\n"
    return f'<{DSML}function_calls>\n<{DSML}invoke name="f">\n{inner}</{DSML}invoke>\n</{DSML}function_calls>'


def _pythonic(call: Call) -> str:
    inner = ", ".join(f"{key}={json.dumps(value).replace('null', 'None')}" for key, value in call.items())
    return f"<function_calls>f({inner})</function_calls>"


def _quoted(call: Call) -> str:
    inner = ",".join(f"{key}:{_gemma(value)}" for key, value in call.items())
    return f"<|tool_call>call:f{{{inner}}}<tool_call|>"


def _plain(value: int | str | None) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _gemma(value: int | str | None) -> str:
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


WRITE = {"qwen3_coder": _elements, "deepseek_v32": _typed, "olmo3": _pythonic, "gemma4": _quoted}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    directory: Path = tmp_path_factory.mktemp("added")
    backend("added").save(str(directory / "tokenizer.json"))
    return Compiler(str(directory), backend("added").get_vocab_size(), [0])


def taken(compiler: Compiler, form: str, schema: dict[str, Any], calls: list[Call]) -> list[Call]:
    """The calls that the grammar takes."""
    grammar = tool_grammars.forced_calls(named(TOOL_FORMATS, form), {"f": schema}, tokenizer("added"), max_calls=1)
    return [call for call in calls if follows(compiler, "added", grammar, WRITE[form](call))]


@pytest.mark.parametrize("form", WRITE)
@pytest.mark.parametrize(
    "bounds",
    [
        {"minProperties": 1},
        {"minProperties": 2, "required": ["b"]},
        {"maxProperties": 1},
        {"maxProperties": 0},
        {"minProperties": 2, "maxProperties": 2, "additionalProperties": True},
        {"minProperties": 4, "additionalProperties": {"type": "integer"}},
        {"minProperties": 1, "maxProperties": 3, "required": ["c"], "additionalProperties": True},
        {"required": ["a", "z"], "additionalProperties": True},
        {"required": ["z"], "additionalProperties": {"type": "integer"}, "maxProperties": 2},
        {"properties": {}, "minProperties": 1, "maxProperties": 2, "additionalProperties": {}},
    ],
    ids=str,
)
def test_calls_have_the_properties_that_their_schema_demands(
    compiler: Compiler, form: str, bounds: dict[str, Any]
) -> None:
    schema = INTEGERS | bounds
    sets = [names for count in range(5) for names in itertools.combinations(NAMES, count)]
    expected = []
    for names in sets:
        more = set(names) - set(schema["properties"])
        fits = bounds.get("minProperties", 0) <= len(names) <= bounds.get("maxProperties", 9)
        if fits and set(bounds.get("required", ())) <= set(names) and ("additionalProperties" in bounds or not more):
            expected.append(dict.fromkeys(names, 1))
    assert taken(compiler, form, schema, [dict.fromkeys(names, 1) for names in sets]) == expected


@pytest.mark.parametrize("form", WRITE)
@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ({"required": ["z"]}, "require 'z' and do not have it"),
        ({"minProperties": 4}, "cannot be as many as"),
        ({"maxProperties": 1, "required": ["a", "b"]}, "cannot be as many as"),
        ({"maxProperties": 1, "minProperties": 2, "additionalProperties": True}, "cannot be as many as"),
        ({"minProperties": 3000, "properties": {f"p{i}": {} for i in range(3000)}}, "too many rules"),
    ],
    ids=["required", "few", "many", "none", "rules"],
)
def test_properties_that_cannot_be_there_are_not_expressible(form: str, bounds: dict[str, Any], why: str) -> None:
    form_of = named(TOOL_FORMATS, form)
    with pytest.raises(tool_grammars.NotExpressible, match=why):
        tool_grammars.forced_calls(form_of, {"f": INTEGERS | bounds}, tokenizer("added"), max_calls=1)


@pytest.mark.parametrize("form", WRITE)
def test_values_of_properties_without_a_name_follow_their_schema(compiler: Compiler, form: str) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": {"enum": [1, "b"]}}
    calls: list[Call] = [{"x": 1}, {"x": "b"}, {"x": 2}, {"x": "c"}]
    assert taken(compiler, form, schema, calls) == calls[:2]


@pytest.mark.parametrize("form", WRITE)
def test_names_may_begin_as_others_do(compiler: Compiler, form: str) -> None:
    schema = {"type": "object", "properties": {"ab": {"const": 1}}, "additionalProperties": {"type": "integer"}}
    calls: list[Call] = [{"ab": 1}, {"abc": 2}, {"a": 2}, {"ab": 1, "aba": 3, "b": 4}]
    assert taken(compiler, form, schema, calls) == calls


@pytest.mark.parametrize("form", WRITE)
@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"type": ["string", "null"]}, 2),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 2),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}, 3),
        ({}, 3),
    ],
    ids=str,
)
def test_values_of_several_types_are_taken_as_each_of_them(
    compiler: Compiler, form: str, schema: dict[str, Any], count: int
) -> None:
    calls: list[Call] = [{"x": "a"}, {"x": None}, {"x": 3}]
    actual = taken(compiler, form, {"type": "object", "properties": {"x": schema}}, calls)
    assert actual == (calls if form == "qwen3_coder" else calls[:count])  # whose values have no types
