"""How a chat template takes what templates differ in, found out by rendering samples.

Contents in parts or as text, the absent content of an assistant's message, its reasoning, the arguments of calls,
calls, several of a message, a text beside the reasoning of a call, system messages between other turns; and what it
writes before an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from tokserve.base.errors import RequestError
from tokserve.features.chat.templates.jinja import render

THOUGHT = "thinking"  # the type of a part of a content, and the name of its text
OBJECT = {"key": "value"}  # the arguments of a sample of a call
SAMPLES = (
    "sample1",
    "sample2",
)  # names of functions, which with two digits are ids of the length that templates demand
CONTENTS: tuple[dict[str, str | None], ...] = ({"content": ""}, {"content": None}, {})
SYSTEM_TURNS = ("system", "user", "system", "assistant", "user", "system")
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
NULLS = ("None", "null")  # as a template may print one

SpecialTokens = tuple[tuple[str, str], ...]


def samples_of(sources: Iterable[str], special_tokens: SpecialTokens) -> Iterator[str]:
    """Short conversations as these templates write them, with the markers that they compose."""
    roles = ("user",), ("system", "user", "assistant", "user"), ("user", "assistant", "tool")
    variables: dict[str, Any] = dict(special_tokens) | {"tools": None, "documents": None, "add_generation_prompt": True}
    for source in sources:
        for chat in roles:
            with suppress(RequestError):
                messages = [{"role": role, "content": "?"} for role in chat]
                yield render(source, variables | {"messages": messages}, "messages")


@lru_cache(maxsize=64)
def takes_parts(source: str, role: str, special_tokens: SpecialTokens) -> bool:
    """Whether a template renders the text of content given in parts, and not the list."""
    if role not in ("system", "user", "assistant"):
        return False
    other = [{"role": "user", "content": "?"}]
    message = {"role": role, "content": [{"type": "text", "text": part} for part in ("1st part", "2nd part")]}
    chat = [message, *other] if role == "system" else [*(other if role == "assistant" else []), message]
    nothing = {"tools": None, "documents": None, "add_generation_prompt": False}
    try:
        rendered = render(source, dict(special_tokens) | nothing | {"messages": chat}, "messages")
    except RequestError:
        return False
    list_printed = re.search(r"""["']type["']""", rendered)
    return "1st part" in rendered and "2nd part" in rendered and not list_printed


@lru_cache(maxsize=64)
def takes_thoughts(source: str, special_tokens: SpecialTokens) -> bool:
    """Whether a template shows the reasoning of an answer that is a part of its content, and no other."""
    thought, text = "1st thought", {"type": "text", "text": "1st part"}
    in_parts = {"content": [{"type": THOUGHT, THOUGHT: thought}, text]}
    apart = {"content": [text], "reasoning_content": thought, THOUGHT: thought}
    shown = _answer(source, special_tokens, in_parts) or ""
    list_printed = re.search(r"""["']type["']""", shown)
    others = _answer(source, special_tokens, apart) or ""
    return thought in shown and text["text"] in shown and not list_printed and thought not in others


@lru_cache(maxsize=64)
def takes_objects(source: str, special_tokens: SpecialTokens) -> bool:
    """Whether a template takes the arguments of calls as an object; else it takes JSON text, as clients send them.  It
    does not if it renders a call with text only, or prints the object as Python does."""
    for content in CONTENTS:
        text, from_object = (_answer(source, special_tokens, content, form) for form in (json.dumps(OBJECT), OBJECT))
        if text is not None and (from_object is None or str(OBJECT) in from_object):
            return False
    return True


@lru_cache(maxsize=64)
def without_content(source: str, calls: bool, special_tokens: SpecialTokens) -> dict[str, str | None]:
    """The content to give an assistant's message without content: null, absent or empty.

    Null or absent if the template treats that differently: it renders something other than for an empty text, and does
    not print the null.  `calls`: the message has tool calls.
    """
    arguments = [_arguments(source, special_tokens)] if calls else []
    usual = _answer(source, special_tokens, CONTENTS[0], *arguments) or ""
    for content in CONTENTS[1:]:
        text = _answer(source, special_tokens, content, *arguments)
        if text not in (None, usual) and all(text.count(null) <= usual.count(null) for null in NULLS):
            return content
    return CONTENTS[0]


@lru_cache(maxsize=64)
def shows_calls(source: str, special_tokens: SpecialTokens) -> bool:
    """Whether a template shows the call of a message, or does not take it."""
    shown = _answer(source, special_tokens, {"content": ""}, _arguments(source, special_tokens))
    return shown is None or SAMPLES[0] in shown


@lru_cache(maxsize=64)
def takes_several_calls(source: str, special_tokens: SpecialTokens) -> bool:
    """Whether a template shows all calls of a message: some refuse more than one, or show the first only.  One that
    shows none takes them."""
    arguments = _arguments(source, special_tokens)
    one, two = (_answer(source, special_tokens, {"content": ""}, *[arguments] * count) for count in (1, 2))
    return one is None or SAMPLES[0] not in one or (two is not None and SAMPLES[1] in two)


@lru_cache(maxsize=64)
def takes_text_with_thought(source: str, special_tokens: SpecialTokens) -> bool:
    """Whether a template renders a call with a text and with reasoning, or neither one of them."""
    arguments, text = _arguments(source, special_tokens), {"content": "1st part"}
    thought = {THOUGHT: "1st thought", "reasoning_content": "1st thought"}
    both, alone = (_answer(source, special_tokens, fields, arguments) for fields in (text | thought, thought))
    return both is not None or alone is None


@lru_cache(maxsize=64)
def before_answer(source: str, special_tokens: SpecialTokens) -> str | None:
    """What a template writes between a question and its answer: the generation prompt, or, without one, what follows
    the question; None if it cannot be told."""
    question = "1st question"
    nothing = {"tools": None, "documents": None}
    variables = dict(special_tokens) | nothing | {"messages": [{"role": "user", "content": question}]}
    try:
        without, prompt = (render(source, variables | {"add_generation_prompt": g}, "messages") for g in (False, True))
    except RequestError:
        return None
    added = prompt.removeprefix(without) if prompt.startswith(without) else ""
    return added if added.strip() else prompt.rpartition(question)[2]


@lru_cache(maxsize=64)
def takes_later_system(source: str, special_tokens: SpecialTokens) -> bool:
    """Whether system messages stay between other turns, with tools and without: many templates have a place for one at
    the start, and refuse others, move them, or leave them out."""
    return all(_in_order(source, special_tokens, tools) for tools in (None, [PROBE_TOOL]))


def _in_order(source: str, special_tokens: SpecialTokens, tools: list[dict[str, Any]] | None) -> bool:
    messages = [{"role": role, "content": f"turn<{index}>"} for index, role in enumerate(SYSTEM_TURNS)]
    variables = dict(special_tokens) | {"messages": messages, "tools": tools, "documents": None}
    try:
        text = render(source, variables | {"add_generation_prompt": True}, "messages")
    except RequestError:
        return False
    places = [text.find(message["content"]) for message in messages]
    return -1 not in places and places == sorted(places)


def _arguments(source: str, special_tokens: SpecialTokens) -> Any:
    """The arguments of a sample of a call, as the template takes them."""
    return OBJECT if takes_objects(source, special_tokens) else json.dumps(OBJECT)


def _answer(source: str, special_tokens: SpecialTokens, content: Mapping[str, Any], *arguments: Any) -> str | None:
    """A question and an answer with this content, and a call with each of these arguments; None if the template
    raises."""
    calls = [
        {"id": f"{name}01", "type": "function", "function": {"name": name, "arguments": one}}
        for name, one in zip(SAMPLES, arguments, strict=False)
    ]
    message = {"role": "assistant", **content} | ({"tool_calls": calls} if calls else {})
    nothing = {"tools": None, "documents": None, "add_generation_prompt": False}
    chat = {"messages": [{"role": "user", "content": "?"}, message]}
    try:
        return render(source, dict(special_tokens) | nothing | chat, "messages")
    except RequestError:
        return None
