"""Structured outputs that constrain an output to tool calls, in a form that `parsing` can parse.

A forced call is a JSON schema, so it works with every model: for a named function the output is its arguments, for
"required" a JSON list of {"name", "parameters"}.  Where a model may either call or answer in some form, its calls are
in its own format, and one grammar in llguidance's dialect of Lark has both.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokserve.features.chat.grammars.bodies import CallBodies
from tokserve.features.chat.grammars.lark import (
    ANY_TEXT,
    ONE_SPACE,
    SPACES,
    added_token,
    embedded,
    grammar_of,
    literal,
    spelled,
    token_ranges,
    up_to,
)
from tokserve.features.chat.grammars.schemas import Functions, NotExpressible, closed, list_of
from tokserve.features.chat.output_format import ToolFormat
from tokserve.protocol.params import GRAMMAR_BYTES, WHITE, StructuredOutputs
from tokserve.text.tokenizer import Tokenizer

__all__ = ["Functions", "NotExpressible", "grammar_of", "literal", "token_ranges"]
GAP = r"/[ \n]{1,2}/"  # between calls, and between the parts of a call that are not JSON
SLASHED = {"/": r"\/", "\n": r"\n"}  # escapes in a regex between slashes
CALL = "calls"  # the rule of calls
LISTED = ("name", "parameters")  # keys of a call in a list that is forced


def arguments(schema: dict[str, Any]) -> StructuredOutputs:
    """Only the arguments of a function with this schema."""
    return _json(closed(schema))


def list_of_calls(functions: Functions, *, max_calls: int) -> StructuredOutputs:
    """[{"name": ..., "parameters": ...}, ...] of at most `max_calls` calls."""
    return _json(list_of(functions, LISTED, max_calls))


def answer_or_calls(
    answer: StructuredOutputs, form: ToolFormat, functions: Functions, tokenizer: Tokenizer, *, max_calls: int
) -> StructuredOutputs:
    """A valid `answer`, or at most `max_calls` calls in the model's format.  Raises `NotExpressible`."""
    # a text may begin either: the lexer needs the same white space in both
    shared = form.bare and answer.kind in ("json", "json_object")
    answer = answer.plain()
    calls = _CallRules(form, tokenizer, _white(answer) if shared else ONE_SPACE)
    start = {"start": "answer | calls", "answer": rule_of(answer)}
    if form.body == "channels":
        start |= messages(f"final answer | {CALL}", tokenizer)
    return grammar_of(start | calls.rules(functions, max_calls))


def forced_calls(form: ToolFormat, functions: Functions, tokenizer: Tokenizer, *, max_calls: int) -> StructuredOutputs:
    """One call, or up to `max_calls`, in the model's format.  Raises `NotExpressible`."""
    start = messages(CALL, tokenizer) if form.body == "channels" else {"start": "calls"}
    return grammar_of(start | _CallRules(form, tokenizer, ONE_SPACE).rules(functions, max_calls))


def within_thought(form: StructuredOutputs, tokenizer: Tokenizer) -> StructuredOutputs:
    """Outputs of a form that are messages of gpt-oss, after the rest of a thought that has begun."""
    body, rules = up_to("<|end|>", tokenizer, "message")
    rules["rest"] = f"{body} {spelled('<|start|>assistant', tokenizer)}"
    return grammar_of({"start": "rest answer", "answer": rule_of(form.plain())} | rules)


def messages(last: str, tokenizer: Tokenizer, *, inside: bool = False) -> dict[str, str]:
    """The rule "start" of gpt-oss: thoughts and remarks, then the `last` message, which may use "final", the header of
    an answer, and "remark", a thought or a remark.  `inside`: the output begins within a thought."""
    body, rules = up_to("<|end|>", tokenizer, "message")
    heads = (spelled(f"<|channel|>{channel}<|message|>", tokenizer) for channel in ("analysis", "commentary", "final"))
    thought, remark, final = heads
    rules["rest"] = f"{body} {spelled('<|start|>assistant', tokenizer)}"
    rules["remark"] = f"({thought} | {remark}) rest"
    rules["final"] = final
    return {"start": f"{'rest ' if inside else ''}remark* ({last})"} | rules


def text_or_calls(form: ToolFormat, functions: Functions, tokenizer: Tokenizer, *, parallel: bool) -> StructuredOutputs:
    """Any text in which everything that begins as a call is a valid call; not for `bare` formats.  Raises
    `NotExpressible`."""
    calls = _CallRules(form, tokenizer, ONE_SPACE)
    if form.body == "channels":
        start = messages(f"final TEXT | {CALL}", tokenizer) | {"TEXT": ANY_TEXT}
    else:
        start = calls.text_with_calls("*" if parallel else "?")
    return grammar_of(start | calls.rules(functions, None if parallel else 1))


def rule_of(answer: StructuredOutputs) -> str:
    """The right side of a rule for structured outputs, which are `plain`."""
    if answer.regex is not None:
        written = re.sub(r"\\.|/|\n", lambda match: SLASHED.get(match[0], match[0]), answer.regex, flags=re.DOTALL)
        return f"/{written or '()'}/"
    if answer.choice is not None:
        return " | ".join(map(literal, answer.choice))
    if answer.grammar is not None:
        return f"%lark {{\n{answer.grammar}\n}}"
    assert not isinstance(answer.json, dict)  # it is plain
    return embedded(json.loads(answer.json or '{"type": "object"}'), _white(answer))


def _white(form: StructuredOutputs) -> dict[str, Any]:
    """llguidance's options for the white space between the parts of JSON."""
    if form.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITE if form.whitespace_pattern is None else form.whitespace_pattern}


class _CallRules:
    """Grammar rules of calls in one format, for one tokenizer.  `white`: white space between the parts of JSON."""

    def __init__(self, form: ToolFormat, tokenizer: Tokenizer, white: dict[str, Any]) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._white = white

    def text_with_calls(self, often: str) -> dict[str, str]:
        """The rule "start", any text with calls in it, and the rules that it needs besides `rules`."""
        begins = [*self._form.frames[:1], *self._form.opens]
        tokens = [token for token in (added_token(text, self._tokenizer) for text in begins) if token is not None]
        if len(tokens) == len(begins):
            return {"start": f"free (calls free){often}", "free": f"<[^{token_ranges(tokens)}]>*"}
        added = token_ranges(self._tokenizer.added_ids)  # a lexer's text contains no added tokens
        others = "(TEXT added)*" if added else ""
        start = {"start": f"{others} (head rest {others}){often} TEXT", "TEXT": ANY_TEXT}
        return start | {"head[lazy]": f"TEXT {self._marker(begins[0])}"} | ({"added": f"<[{added}]>"} if added else {})

    def rules(self, functions: Functions, max_calls: int | None) -> dict[str, str]:
        """The rules "calls", "rest" (calls after the first marker), and those that they need.  `max_calls` None: any
        number.  Where the format has lists of calls, each call may be a list."""
        form, size, limit = self._form, len(json.dumps(functions)), GRAMMAR_BYTES["grammar"]
        if size > limit:  # the grammar would be larger and be refused later
            raise NotExpressible(f"the functions have {size} bytes, and a grammar at most {limit}")
        bodies = CallBodies(form, self._tokenizer, self._white)
        body = bodies.body(functions, max_calls)
        rules = {"body": body, "gap": GAP, **bodies.extra}
        often = "*" if max_calls is None else f"{{0,{max_calls - 1}}}"
        more = "" if max_calls == 1 or form.grouped else f"(gap? call){often}"
        bare = "body" if max_calls == 1 or form.body != "json" else f'body (gap? ";" gap? body){often}'
        if not form.opens:
            return rules | {"calls": bare}
        opens, closes, *frames = map(self._marker, (form.opens[0], form.closes, *form.frames))
        rules |= {
            "call": f"{opens} inside",
            "inside": f"gap? body gap? {closes}" if closes else "gap? body",
            "calls": f"{frames[0] if frames else opens} rest" + (f" | {bare}" if form.bare else ""),
            "rest": f"call {more} {frames[1]}" if frames else f"inside {more}",
        }
        return rules

    def _marker(self, text: str) -> str:
        return spelled(text, self._tokenizer) if text else ""


def _json(schema: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(json=schema, whitespace_pattern=SPACES)
