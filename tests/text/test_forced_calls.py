# ruff: noqa: RUF001
"""Calls that are forced in the form of each family: the grammar takes what the family writes, and nothing else, and
whatever it takes is read back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.grammars import Matcher
from tests.text.test_tool_grammars import backend, follows, tokenizer
from tokserve.dialects.openai import tools
from tokserve.features.chat import tool_grammars
from tokserve.features.chat.output_format import AnswerStart, OutputFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.tool_formats import THINKING, TOOL_FORMATS, named
from tokserve.features.grammar.grammar import Compiler
from tokserve.protocol.params import StructuredOutputs

FUNCTIONS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "required": ["city"],
        "properties": {
            "city": {"enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "sure": {"type": "boolean"},
        },
    },
    "ping": {"type": "object", "properties": {}},
}
ARGUMENTS = '{"city": "Oslo", "days": 3, "sure": true}'
FENCE = f"```json\n{ARGUMENTS}\n```"
PYTHON = 'weather(city="Oslo", days=3, sure=True)'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
PARAMETERS = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DSML = "｜DSML｜"
WRITTEN = {  # a call of "weather" with ARGUMENTS
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n<parameter=sure>\ntrue\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
    "<parameter=days>3</parameter>\n<parameter=sure>true</parameter>\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>sure</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="sure">true</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": f'<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Oslo</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
    f'<{DSML}parameter name="sure" string="false">true</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}",
    "deepseek_v31": f"{ALL_BEGIN}{BEGIN}weather{SEPARATOR}{ARGUMENTS}{END}{ALL_END}",
    "deepseek_v3": f"{ALL_BEGIN}{BEGIN}function{SEPARATOR}weather\n{FENCE}{END}{ALL_END}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
    "phi4_mini_json": f"<|tool_call|>[{CALL}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{CALL}]",
    "nemotron_json": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "hunyuan_a13b": f"<tool_calls>[{CALL}]</tool_calls>",
    "hunyuan": f"<tool_calls><tool_call>weather\n{FENCE}</tool_call></tool_calls>",
    "cohere_command3": f'<|START_ACTION|>[{{"tool_name": "weather", "parameters": {ARGUMENTS}}}]<|END_ACTION|>',
    "internlm": f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>",
    "functiongemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3,sure:true}<end_function_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3,sure:true}<tool_call|>',
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "minicpm": f"<|tool_call_start|>\n```python\n{PYTHON}\n```\n<|tool_call_end|>",
    "olmo3": f"<function_calls>{PYTHON}</function_calls>",
    "glm4": f"weather\n{ARGUMENTS}",
    "llama4_pythonic": f"[{PYTHON}]",
    "pythonic": f"[{PYTHON}]",
}
FORMS = pytest.mark.parametrize("form", WRITTEN)


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiler]:
    compilers = {}
    for marks in ("text", "added"):
        directory: Path = tmp_path_factory.mktemp(marks)
        backend(marks).save(str(directory / "tokenizer.json"))
        compilers[marks] = Compiler(str(directory), backend(marks).get_vocab_size(), [0])
    return compilers


def grammar(form: str, marks: str, functions: dict[str, Any] = FUNCTIONS, max_calls: int = 2) -> StructuredOutputs:
    calls = tool_grammars.forced_calls(named(TOOL_FORMATS, form), functions, tokenizer(marks), max_calls=max_calls)
    calls.validate()
    return calls


def read(form: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls."""
    parser = Parser(OutputFormat(named(TOOL_FORMATS, form), functions=FUNCTIONS, exact=True))
    segments = parser.push(text, final=True)
    content = "".join(part for kind, part in segments if kind == "content")
    names = [part for kind, part in segments if kind == "call"]
    arguments = "".join(part if kind == "arguments" else "\n" for kind, part in segments if kind != "content").split(
        "\n"
    )
    assert parser.complete == bool(names)
    return content, [(name, json.loads(one)) for name, one in zip(names, arguments[1:], strict=True)]


def test_every_form_that_is_no_plain_object_has_its_grammar() -> None:
    assert set(WRITTEN) == {form.name for form in TOOL_FORMATS if not form.is_json}


@pytest.mark.some(14)
@FORMS
def test_the_grammar_takes_what_the_family_writes(compilers: dict[str, Compiler], form: str) -> None:
    text = WRITTEN[form]
    assert read(form, text) == ("", [("weather", json.loads(ARGUMENTS))])
    for marks in ("text", "added"):
        calls = grammar(form, marks)
        assert follows(compilers[marks], marks, calls, text)
        wrong = (text.replace("Oslo", "Rom"), text.replace("weather", "water"), f"So {text}", text[:-1], "Hello", "")
        for other in wrong if marks == "added" else wrong[:1]:
            assert not follows(compilers[marks], marks, calls, other), other


OPEN = {  # a call of a function of which nothing is known, as it stands in a text whose calls a grammar keeps to
    "qwen3_coder": "<tool_call>\n<function=any>\n<parameter=q>\nb {c}\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>any\n<arg_key>q</arg_key>\n<arg_value>b {c}</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="any">\n<parameter name="q">b {c}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v32": f'<{DSML}function_calls>\n<{DSML}invoke name="any">\n'
    f'<{DSML}parameter name="q" string="true">b {{c}}</{DSML}parameter>\n'
    f'<{DSML}parameter name="r" string="false">[1]</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
    "lfm2": '<|tool_call_start|>[any(q="b {c}", r={"x":[1]})]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:any{q:<|"|>b {c}<|"|>,r:{x:[1,null]}}<tool_call|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.any:0<|tool_call_argument_begin|>"
    '{"q": "b {c}"}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("form", OPEN)
def test_beside_strict_functions_others_have_any_arguments(compilers: dict[str, Compiler], form: str) -> None:
    functions = {**FUNCTIONS, "any": tools.ANY}
    for marks in ("text", "added"):
        row = named(TOOL_FORMATS, form)
        grammar = tool_grammars.text_or_calls(row, functions, tokenizer(marks), parallel=True)
        grammar.validate()
        assert follows(compilers[marks], marks, grammar, f"So {OPEN[form]}")
        assert follows(compilers[marks], marks, grammar, f"So {WRITTEN[form]}")
        assert not follows(compilers[marks], marks, grammar, f"So {WRITTEN[form].replace('Oslo', 'Rom')}")
    parser = Parser(OutputFormat(row, functions=functions, exact=True))
    arguments = "".join(part for kind, part in parser.push(OPEN[form], final=True) if kind == "arguments")
    assert json.loads(arguments)["q"] == "b {c}"


@FORMS
def test_whatever_the_grammar_takes_is_read_back(compilers: dict[str, Compiler], form: str) -> None:
    seen = set()
    for seed in range(8 if form == "openai" else 2):  # whose thoughts may not end
        state = Matcher(compilers["added"].compile(grammar(form, "added")), ends=True)
        chance, tokens = random.Random(seed), []
        while len(tokens) < 400:
            allowed = np.flatnonzero(np.unpackbits(state.bits.view(np.uint8), bitorder="little")).tolist()
            token = 0 if 0 in allowed else chance.choice(allowed)
            if token == 0:
                break
            tokens.append(token)
            state.advance(token)
        else:
            continue  # a thought without end
        content, calls = read(form, backend("added").decode(tokens, skip_special_tokens=False))
        most = 4 if form == "mistral" else 2  # each of its calls may be a list
        assert calls and len(calls) <= most and (not content or form == "openai")
        seen |= {name for name, _ in calls}
        for name, arguments in calls:
            assert arguments.keys() <= FUNCTIONS[name]["properties"].keys()
            assert name == "ping" or arguments["city"] in ("Oslo", "Rome")
            assert arguments.get("days", 1) in range(1, 10) and arguments.get("sure", True) in (True, False)
    assert seen


CONSTANTS = {
    "f": {
        "properties": {
            "a": {"type": "string", "enum": ["x", None, 5, "true"]},
            "b": {"type": ["integer", "null"], "enum": ["x", None, 5, 5.5, True]},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
}


@pytest.mark.parametrize("form", [form for form, text in WRITTEN.items() if CALL not in text and ARGUMENTS not in text])
def test_constants_are_of_the_type_of_their_parameter(compilers: dict[str, Compiler], form: str) -> None:
    compiled = compilers["added"].compile(grammar(form, "added", CONSTANTS, max_calls=1))
    for seed in range(4):
        state, chance, tokens = Matcher(compiled, ends=True), random.Random(seed), []
        while 0 not in (
            allowed := np.flatnonzero(np.unpackbits(state.bits.view(np.uint8), bitorder="little")).tolist()
        ):
            tokens.append(chance.choice(allowed))
            state.advance(tokens[-1])
        parser = Parser(OutputFormat(named(TOOL_FORMATS, form), functions=CONSTANTS, exact=True))
        segments = parser.push(backend("added").decode(tokens, skip_special_tokens=False), final=True)
        arguments = json.loads("".join(part for kind, part in segments if kind == "arguments"))
        assert arguments["a"] in ("x", "true") and arguments["b"] in (None, 5), arguments


def test_constants_that_are_all_of_another_type_are_no_grammar() -> None:
    functions = {"f": {"properties": {"a": {"type": "string", "const": 5}}}}
    with pytest.raises(tool_grammars.NotExpressible, match="of another type"):
        grammar("qwen3_coder", "added", functions)


@pytest.mark.parametrize("name", ["under", "u_1.b-c", "\u00fcber", "a\u0301", "\u07ad"])
def test_names_that_no_schema_has_are_ones_that_are_read_back(compilers: dict[str, Compiler], name: str) -> None:
    calls = grammar("pythonic", "added", {"f": {"properties": {}, "additionalProperties": True}}, max_calls=1)
    assert follows(compilers["added"], "added", calls, f"[f({name}=1)]") == name.isascii()


NESTED: dict[str, Any] = {
    "properties": {
        "to": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {"type": "object", "properties": {"x": {"type": "number"}, "name": {"type": ["string", "null"]}}},
        "mode": {"anyOf": [{"const": "on"}, {"type": "integer"}]},
    }
}


@pytest.mark.parametrize(
    ("form", "taken"),
    [
        ("gemma4", 'call:f{to:<|"|>a, {b}<|"|>,tags:[<|"|>x<|"|>,<|"|><|"|>],at:{x:1.5,name:null},mode:3}'),
        ("gemma4", 'call:f{tags:[],mode:<|"|>on<|"|>}'),
        ("gemma4", "call:f{}"),
        ("lfm2", '[f(to="a\\n", tags=["x"], at={"x":1.5, "name":null}, mode="on")]'),
        ("lfm2", "[f(mode=3)]"),
        ("lfm2", "[f()]"),
    ],
)
def test_values_of_every_type(compilers: dict[str, Compiler], form: str, taken: str) -> None:
    row = named(TOOL_FORMATS, form)
    text = row.opens[0] + taken + row.closes
    for marks in ("text", "added"):
        assert follows(compilers[marks], marks, grammar(form, marks, {"f": NESTED}), text)
        for wrong in (text.replace("mode", "node"), text.replace("f", "g", 1), text.replace("on", "off")):
            assert wrong == text or not follows(compilers[marks], marks, grammar(form, marks, {"f": NESTED}), wrong)


@pytest.mark.parametrize(
    "schema", [{"anyOf": [{}]}, {"properties": {"a b": {}}}, {"properties": {"a": {"$ref": "#/x"}}}]
)
def test_a_function_that_the_form_cannot_have_is_forced_as_json(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    choices: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": "f"}})
    for choice in choices:
        plan = tools.make_plan(
            [tool],
            choice,
            parallel=True,
            response_format=None,
            form=named(TOOL_FORMATS, "gemma4"),
            thinking=None,
            tokenizer=tokenizer("text"),
        )
        assert plan.structured_outputs is not None and plan.structured_outputs.kind == "json"
        text = '[{"name": "f", "parameters": {"x": 1}}]' if choice == "required" else '{"x": 1}'
        assert plan.output_format is not None
        segments = Parser(plan.output_format).push(text, final=True)
        assert [(kind, part) for kind, part in segments if kind == "call"] == [("call", "f")]


def planned(choice: Any, marks: str, **options: Any) -> tools.ToolPlan:
    tool = {"type": "function", "function": {"name": "weather", "parameters": FUNCTIONS["weather"], "strict": True}}
    values = {"parallel": True, "response_format": None, "form": named(TOOL_FORMATS, "openai")}
    values |= {"thinking": named(THINKING, "openai_gptoss"), "tokenizer": tokenizer(marks)} | options
    return tools.make_plan([tool], choice, **values)


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize("marks", ["text", "added"])
def test_messages_of_gpt_oss_around_calls_and_answers(compilers: dict[str, Compiler], marks: str) -> None:
    def takes(plan: tools.ToolPlan, text: str, *, inside: bool = False) -> bool:
        form = plan.from_start(tokenizer(marks), [], AnswerStart(inside), may_think=True)
        assert form is not None
        return follows(compilers[marks], marks, form, text)

    call, final = WRITTEN["openai"], "<|channel|>final<|message|>"
    answer = tools.ResponseFormat(StructuredOutputs(choice=["yes"]), "response_format")
    forced, strict = planned("required", marks), planned("auto", marks)
    either, form_only = planned("auto", marks, response_format=answer), planned("none", marks, response_format=answer)
    for plan, text, taken in (
        (forced, call, True),
        (forced, THOUGHT + call, True),
        (forced, THOUGHT + final + "yes", False),
        (strict, THOUGHT + call, True),
        (strict, final + "It rains.", True),
        (strict, call.replace("Oslo", "Rom"), False),
        (either, THOUGHT + final + "yes", True),
        (either, call, True),
        (either, final + "no", False),
        (form_only, THOUGHT + final + "yes", True),
        (form_only, call, False),
        (form_only, "yes", False),
    ):
        assert takes(plan, text) == taken, text
        inside = f"Hm.<|end|><|start|>assistant{text}"
        assert takes(plan, inside, inside=True) == taken, inside
