"""Structured outputs that begin after the reasoning: a model thinks as it will, and what follows has the form.

The thought and the form are one grammar, so where the thought ends is decided token by token, also if its end marker is
several tokens, or shares one with what follows.  A thought may hold any text and tokens, but no special tokens: one of
those would end the output without its form.
"""

from __future__ import annotations

from tokserve.features.chat.grammars.lark import added_token, grammar_of, in_regex, literal, token_ranges
from tokserve.features.chat.output_format import Thinking
from tokserve.features.chat.tool_grammars import messages, rule_of
from tokserve.protocol.params import StructuredOutputs
from tokserve.text.tokenizer import Tokenizer

GAP = r"/[ \t\r\n]{1,16}/"  # around the markers; the parser drops it


def after_reasoning(
    form: StructuredOutputs, thinking: Thinking, tokenizer: Tokenizer, *, inside: bool
) -> StructuredOutputs:
    """Outputs of the form, after a thought.  `inside`: the thought has begun already; else the output may begin one."""
    if thinking.channels:
        return grammar_of(messages("final answer", tokenizer, inside=inside) | {"answer": rule_of(form.plain())})
    opens, closes = (added_token(mark, tokenizer) for mark in (thinking.opens, thinking.closes))
    rules = {"thought": "spelled GAP?", "spelled[lazy]": rf"/(.|\n)*{in_regex(thinking.closes)}/", "GAP": GAP}
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
