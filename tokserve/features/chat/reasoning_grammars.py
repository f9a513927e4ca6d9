"""Structured outputs that begin after the reasoning: a model thinks as it will, and what follows has the form.

The thought and the form are one grammar, so where the thought ends is decided token by token, also if its end marker is
several tokens, or shares one with what follows.  A thought may hold any text and tokens, but no special tokens: one of
those would end the output without its form.
"""

from __future__ import annotations

import re

from tokserve.features.chat.output_format import Thinking
from tokserve.features.chat.tool_grammars import grammar_of, literal, rule_of, token_ranges
from tokserve.protocol.params import StructuredOutputs
from tokserve.text.tokenizer import Tokenizer

GAP = r"/[ \t\r\n]{1,16}/"  # around the markers; the parser drops it


def after_reasoning(
    form: StructuredOutputs, thinking: Thinking, tokenizer: Tokenizer, *, inside: bool
) -> StructuredOutputs:
    """Outputs of the form, after a thought.  `inside`: the thought has begun already; else the output may begin one."""
    opens, closes = (_added(mark, tokenizer) for mark in (thinking.opens, thinking.closes))
    rules = {"thought": "spelled GAP?", "spelled[lazy]": rf"/(.|\n)*{_escaped(thinking.closes)}/", "GAP": GAP}
    if closes is not None:
        rules["thought"] = f"(spelled | TEXT <[{closes}]>) GAP?"
    others = tokenizer.added_ids - tokenizer.special_ids - {closes}
    if others:
        rules["thought"] = f"(TEXT <[{token_ranges(others)}]>)* {rules['thought']}"
    if others or closes is not None:
        rules["TEXT"] = r"/(.|\n)*/"
    opening = literal(thinking.opens) if opens is None else f"({literal(thinking.opens)} | <[{opens}]>)"
    start = "thought answer" if inside else f"(GAP? {opening} thought)? answer"
    return grammar_of({"start": start, "answer": rule_of(form.plain())} | rules)


def _added(mark: str, tokenizer: Tokenizer) -> int | None:
    """The token that is this mark, if there is one."""
    token = tokenizer.id_of(mark)
    return token if token in tokenizer.added_ids else None


def _escaped(text: str) -> str:
    """The text in a regex between slashes."""
    return re.escape(text).replace("/", r"\/")
