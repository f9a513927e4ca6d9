"""Where an answer begins, told from the end of its prompt: inside the reasoning, or after it.

A prompt may end with the beginning of the answer, so what counts is the assistant's open turn, and not the last tokens.
It begins after the last header, which is what the chat template writes before an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokserve.features.chat.output_format import AnswerStart, Thinking
from tokserve.text.tokenizer import Tokenizer

WINDOW = 64  # tokens at the end of a prompt that are looked at first
GROWTH = 8


def answer_start(
    thinking: Thinking, tokenizer: Tokenizer, prompt: Sequence[int], before_answer: str | None
) -> AnswerStart:
    """Where the answer to a prompt begins.  `before_answer`: what the template writes between a question and its
    answer; None: unknown."""
    header = _header(thinking, before_answer or "")
    size = WINDOW
    text = tokenizer.decode(prompt[-size:], False)
    while header:
        begin = text.rfind(header)
        if begin >= 0:
            return thinking.start_after(text[begin + len(header) :])
        if size >= len(prompt):
            break
        size *= GROWTH
        text = tokenizer.decode(prompt[-size:], False)
    return thinking.start_after_tail(text)


def _header(thinking: Thinking, before_answer: str) -> str:
    """What the template writes before the answer and its reasoning."""
    return before_answer.partition(thinking.opens)[0].partition(thinking.closes)[0].strip()
