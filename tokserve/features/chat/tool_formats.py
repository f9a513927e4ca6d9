"""The formats in which models write tool calls and reasoning, and how to recognize the one of a chat template.

A format is a row of a table, which `parsing` interprets.  The names are those of vLLM's parsers.  The format of a model
is recognised by the call that its template renders in a conversation, not by the model's name.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, TypeVar

import msgspec

from tokserve.base.errors import RequestError
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.histories import Message
from tokserve.features.chat.output_format import OutputFormat, Thinking, ToolFormat
from tokserve.features.chat.parsing import Parser

F = TypeVar("F", ToolFormat, Thinking)

# In the order in which `recognize` tries them.
TOOL_FORMATS = (
    # <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>: Hermes, Qwen 2.5, Qwen 3
    ToolFormat("hermes", opens=("<tool_call>",), closes="</tool_call>"),
    # <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>: Qwen 3 Coder
    ToolFormat("qwen3_coder", opens=("<tool_call>",), closes="</tool_call>", body="xml", begins="<function="),
    # [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}], later [TOOL_CALLS]f[ARGS]{"a": 1}, of some versions
    # [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}
    ToolFormat("mistral", opens=("[TOOL_CALLS]",), body="named", separator="[ARGS]", call_id="[CALL_ID]"),
    ToolFormat(
        "deepseek_v31",
        opens=("<｜tool▁call▁begin｜>",),  # noqa: RUF001
        closes="<｜tool▁call▁end｜>",  # noqa: RUF001
        body="named",
        separator="<｜tool▁sep｜>",  # noqa: RUF001
        frames=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
    ),
    # {"name": "f", "parameters": {"a": 1}} and nothing else, of a known function: Llama 3.1 to 3.3
    ToolFormat("llama3_json", opens=("<|python_tag|>",), bare=True),
)
# The output of every model with "required": [{"name": "f", "parameters": {"a": 1}}]
FORCED = ToolFormat("forced", bare=True)
THINKING = (
    Thinking("qwen3", "<think>", "</think>"),
    Thinking("deepseek_r1", "<think>", "</think>", assumed=True),  # its first templates did not open it
    Thinking("mistral", "[THINK]", "[/THINK]"),
)

QUESTION = {"role": "user", "content": "probe"}
ARGUMENTS = {"probe_key": "probe_value"}
FUNCTION: dict[str, Any] = {
    "name": "probe_function",
    "description": "probe",
    "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
}
CALL = {"id": "probe0001", "type": "function", "function": {"name": FUNCTION["name"], "arguments": ARGUMENTS}}


def named(table: tuple[F, ...], name: str) -> F:
    """The row with this name, which must exist."""
    return next(row for row in table if row.name == name)


def recognize(template: ChatTemplate) -> ToolFormat | None:
    """The format in which a template renders calls of an earlier turn; None if it renders none, or is unknown."""
    tools = [{"type": "function", "function": FUNCTION}]
    try:
        # an answer follows the generation prompt, which may end in a marker that begins like a call's
        question, prompt = (template.text([QUESTION], tools=tools, add_generation_prompt=g) for g in (False, True))
        history: list[Message] = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        whole = template.text(history, tools=tools, add_generation_prompt=False)
    except RequestError:
        return None
    turn, answer = _without_common_prefix(question, whole), _without_common_prefix(prompt, whole)
    return next((form for form in TOOL_FORMATS if _reads(form, answer if form.bare else turn)), None)


def _without_common_prefix(prefix: str, whole: str) -> str:
    """`whole` without the common beginning."""
    return whole[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, whole, strict=False))) :]


def _reads(form: ToolFormat, turn: str) -> bool:
    """Whether the turn, parsed in this format, has exactly the call."""
    segments = Parser(OutputFormat(tools=form, functions={FUNCTION["name"]: FUNCTION["parameters"]})).push(
        turn, final=True
    )
    names = [text for kind, text in segments if kind == "call"]
    arguments = "".join(text for kind, text in segments if kind == "arguments")
    try:
        return names == [FUNCTION["name"]] and msgspec.json.decode(arguments) == ARGUMENTS
    except msgspec.DecodeError:
        return False
