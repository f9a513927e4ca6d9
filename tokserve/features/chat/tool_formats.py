"""The formats in which models write tool calls and reasoning, and how to recognize the one of a chat template.

A format is a row of a table, which `parsing` interprets.  The names are those of vLLM's parsers.  The format of a model
is recognised by the call that its template renders in a conversation, not by the model's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, TypeVar

import msgspec

from tokserve.base.errors import RequestError, StartError
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.output_format import OutputFormat, Tags, Thinking, ToolFormat
from tokserve.features.chat.parsing import Parser
from tokserve.features.chat.templates.histories import Message

F = TypeVar("F", ToolFormat, Thinking)

DSML = "｜DSML｜"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>",), "<｜tool▁call▁end｜>"  # noqa: RUF001
DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
INVOKE = Tags("<invoke name=", "</invoke>", "<parameter name=", padded=False, grouped=True)
DSML_INVOKE = Tags(
    f"<{DSML}invoke name=",
    f"</{DSML}invoke>",
    f"<{DSML}parameter name=",
    parameter_end=f"</{DSML}parameter>",
    padded=False,
    typed=True,
    grouped=True,
)
PAIRS = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", padded=False)
# In the order in which `recognize` tries them.
TOOL_FORMATS = (
    # <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>: Hermes, Qwen 2.5, Qwen 3, Granite 4, SmolLM 3
    ToolFormat("hermes", opens=("<tool_call>",), closes="</tool_call>"),
    # <seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>
    ToolFormat(
        "seed_oss",
        opens=("<seed:tool_call>",),
        closes="</seed:tool_call>",
        body="elements",
        tags=Tags(padded=False),
        begins="<function=",
    ),
    # <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>: Qwen 3 Coder, Qwen 3.5
    ToolFormat("qwen3_coder", opens=("<tool_call>",), closes="</tool_call>", body="elements", begins="<function="),
    # <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>: GLM-4.5 to 4.7
    ToolFormat("glm45", opens=("<tool_call>",), closes="</tool_call>", body="elements", tags=PAIRS),
    # <minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>
    ToolFormat(
        "minimax_m2",
        opens=("<minimax:tool_call>",),
        closes="</minimax:tool_call>",
        body="elements",
        tags=INVOKE,
        begins="<invoke name=",
    ),
    # the same with another prefix, and an attribute that says whether a value is a string
    ToolFormat(
        "deepseek_v32",
        opens=(f"<{DSML}function_calls>",),
        closes=f"</{DSML}function_calls>",
        body="elements",
        tags=DSML_INVOKE,
        begins=f"<{DSML}invoke name=",
        signs=(f"<{DSML}function_calls>",),
    ),
    # [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}], later [TOOL_CALLS]f[ARGS]{"a": 1}, of some versions
    # [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}
    ToolFormat("mistral", opens=("[TOOL_CALLS]",), body="named", separator="[ARGS]", call_id="[CALL_ID]"),
    ToolFormat("deepseek_v31", *DEEPSEEK_CALL, body="named", separator=SEPARATOR, frames=DEEPSEEK_CALLS),
    # <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>: V3 and R1  # noqa: RUF003
    ToolFormat(
        "deepseek_v3",
        *DEEPSEEK_CALL,
        body="named",
        before=("function", SEPARATOR),
        separator="\n```json\n",
        after="```",
        frames=DEEPSEEK_CALLS,
    ),
    # <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
    ToolFormat(
        "kimi_k2",
        opens=("<|tool_call_begin|>",),
        closes="<|tool_call_end|>",
        body="named",
        separator="<|tool_call_argument_begin|>",
        frames=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        has_ids=True,
        signs=("tool_declare",),
    ),
    # <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>: gpt-oss
    ToolFormat("openai", closes="<|call|>", body="channels"),
    # <|function_call|>{"name": "f", "arguments": {"a": 1}}: GigaChat 3.1
    ToolFormat("gigachat3", ("<|function_call|>",)),
    # [{"name": "f", "arguments": {"a": 1}}] between markers
    ToolFormat("phi4_mini_json", ("<|tool_call|>",), "<|/tool_call|>", listed=True, signs=("<|tool|>", "<|/tool|>")),
    ToolFormat("granite", ("<|tool_call|>",), listed=True, signs=("<|tool_call|>",)),
    ToolFormat("nemotron_json", ("<TOOLCALL>",), "</TOOLCALL>", listed=True, signs=("<TOOLCALL>",)),
    ToolFormat("hunyuan_a13b", ("<tool_calls>",), "</tool_calls>", listed=True),
    # <tool_calls><tool_call>f\n```json\n{"a": 1}\n```</tool_call></tool_calls>: HunYuan 1, dense
    ToolFormat(
        "hunyuan",
        ("<tool_call>",),
        "</tool_call>",
        body="named",
        separator="\n```json\n",
        after="```",
        frames=("<tool_calls>", "</tool_calls>"),
    ),
    # <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>: Command R7B, A
    ToolFormat(
        "cohere_command3",
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        keys=("tool_name", "parameters"),
        listed=True,
    ),
    # <|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>
    ToolFormat(
        "internlm",
        ("<|action_start|>",),
        "<|action_end|>",
        keys=("name", "parameters"),
        before=("<|plugin|>",),
        signs=("<|plugin|>",),
    ),
    # <start_function_call>call:f{a:1,b:<escape>text<escape>}<end_function_call>
    ToolFormat(
        "functiongemma",
        ("<start_function_call>",),
        "<end_function_call>",
        body="quoted",
        before=("call:",),
        quote="<escape>",
    ),
    ToolFormat("gemma4", ("<|tool_call>",), "<tool_call|>", body="quoted", before=("call:",), quote='<|"|>'),
    # [f(a=1), g(b="text")] between markers
    ToolFormat(
        "lfm2",
        ("<|tool_call_start|>",),
        "<|tool_call_end|>",
        body="pythonic",
        listed=True,
        signs=("<|tool_list_start|>",),
    ),
    # <|tool_call_start|>\n```python\nf(a=1)\n```\n<|tool_call_end|>
    ToolFormat(
        "minicpm",
        ("<|tool_call_start|>",),
        "<|tool_call_end|>",
        body="pythonic",
        before=("```python",),
        after="```",
        signs=("<|tool_call_start|>", "```python"),
    ),
    # <function_calls>f(a=1)\ng(b="text")</function_calls>
    ToolFormat("olmo3", ("<function_calls>",), "</function_calls>", body="pythonic", signs=("<function_calls>",)),
    # f\n{"a": 1}, of a known function and nothing else: GLM-4
    ToolFormat("glm4", body="named", separator="\n", bare=True),
    # {"name": "f", "parameters": {"a": 1}} and nothing else, of a known function: Llama 3.1 to 3.3
    ToolFormat("llama3_json", opens=("<|python_tag|>",), keys=("name", "parameters"), bare=True),
    # the same, or [f(a=1)]: Llama 4, whose templates show either, with or without markers around them
    ToolFormat(
        "llama4_pythonic",
        body="pythonic",
        listed=True,
        keys=("name", "parameters"),
        bare=True,
        frames=("<|python_start|>", "<|python_end|>"),
    ),
    ToolFormat("pythonic", body="pythonic", listed=True, keys=("name", "parameters"), bare=True),
)
# The output of every model with "required": [{"name": "f", "parameters": {"a": 1}}]
FORCED = ToolFormat("forced", keys=("name", "parameters"), bare=True)
# In the order in which `recognize_thinking` tries them.
THINKING = (
    Thinking("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>", channels=True),
    Thinking("seed_oss", "<seed:think>", "</seed:think>"),
    Thinking(
        "cohere_command3",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    Thinking("minicpm", "<|thought_start|>", "<|thought_end|>"),
    Thinking("gemma4", "<|channel>thought", "<channel|>", signs=("<|channel>", "<channel|>")),
    Thinking("mistral", "[THINK]", "[/THINK]"),
    Thinking("granite", "Here is my thought process:", "Here is my response:"),
    Thinking("minimax_m2", "<think>", "</think>", signs=("<think>", "<minimax:tool_call>")),
    Thinking("hunyuan_a13b", "<think>", "</think>", answer=("<answer>", "</answer>"), signs=("<think>", "<answer>")),
    Thinking("ernie45", "<think>", "</think>", answer=("<response>", "</response>"), signs=("<think>", "<response>")),
    # its templates did not open it at first, and cut it off answers of earlier turns
    Thinking("deepseek_r1", "<think>", "</think>", assumed=True, signs=("</think>", "<｜tool▁outputs▁begin｜>")),  # noqa: RUF001
    Thinking("qwen3", "<think>", "</think>", signs=("</think>",)),
)

QUESTION = {"role": "user", "content": "probe"}
ARGUMENTS = {"probe_key": "probe_value"}
FUNCTION: dict[str, Any] = {
    "name": "probe_function",
    "description": "probe",
    "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
}
FUNCTION_CALL = {"name": FUNCTION["name"], "arguments": ARGUMENTS}
# an id that all templates take, and one for a template that shows the id instead of the name
CALLS = tuple(
    {"id": call_id, "type": "function", "function": FUNCTION_CALL}
    for call_id in ("probe0001", f"functions.{FUNCTION['name']}:0")
)


def named(table: Sequence[F], name: str, option: str = "") -> F:
    """The row with this name.  Raises StartError if there is none, which is the value of this `option`."""
    for row in table:
        if row.name == name:
            return row
    raise StartError(f"option {option}: must be auto or one of {', '.join(row.name for row in table)}, got {name!r}")


def recognize(template: ChatTemplate, table: Sequence[ToolFormat] = TOOL_FORMATS) -> ToolFormat | None:
    """The format in which a template renders calls of an earlier turn, or else that of its `signs`; None: unknown."""
    for call in CALLS:
        if (form := _recognize_call(template, call, table)) is not None:
            return form
    sources = _sources(template)
    return next((form for form in table if form.signs and _has_signs(sources, form.signs)), None)


def recognize_thinking(template: ChatTemplate, table: Sequence[Thinking] = THINKING) -> Thinking | None:
    """How the models of a template mark their reasoning: as the first row whose `signs` the template holds; None: the
    template says nothing of it."""
    sources = _sources(template)
    return next((row for row in table if _has_signs(sources, row.signs or (row.opens, row.closes))), None)


def _sources(template: ChatTemplate) -> list[str]:
    sources = template.sources
    return list(sources.values()) if isinstance(sources, dict) else [sources or ""]


def _has_signs(sources: list[str], signs: tuple[str, ...]) -> bool:
    return any(all(sign in source for sign in signs) for source in sources)


def _recognize_call(template: ChatTemplate, call: dict[str, Any], table: Sequence[ToolFormat]) -> ToolFormat | None:
    tools = [{"type": "function", "function": FUNCTION}]
    try:
        # an answer follows the generation prompt, which may end in a marker that begins like a call's
        question, prompt = (template.text([QUESTION], tools=tools, add_generation_prompt=g) for g in (False, True))
        history: list[Message] = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
        whole = template.text(history, tools=tools, add_generation_prompt=False)
    except RequestError:
        return None
    turn, answer = _without_common_prefix(question, whole), _without_common_prefix(prompt, whole)
    return next((form for form in table if _reads(form, answer if form.bare else turn)), None)


def _without_common_prefix(prefix: str, whole: str) -> str:
    """`whole` without the common beginning."""
    return whole[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, whole, strict=False))) :]


def _reads(form: ToolFormat, turn: str) -> bool:
    """Whether the turn has the markers of this format and, parsed in it, exactly the call."""
    if form.closes not in turn or not (form.bare or not form.opens or any(mark in turn for mark in form.opens)):
        return False
    segments = Parser(OutputFormat(tools=form, functions={FUNCTION["name"]: FUNCTION["parameters"]})).push(
        turn, final=True
    )
    names = [text for kind, text in segments if kind == "call"]
    arguments = "".join(text for kind, text in segments if kind == "arguments")
    try:
        return names == [FUNCTION["name"]] and msgspec.json.decode(arguments) == ARGUMENTS
    except msgspec.DecodeError:
        return False
