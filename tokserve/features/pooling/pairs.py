"""Pairs of texts: which belong together, the prompts that a cross-encoder reads, the similarity of two vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tokserve.base.errors import RequestError
from tokserve.features.chat.chat import ChatTemplate
from tokserve.features.chat.templates.special_text import Treatment
from tokserve.features.pooling.pooled_outputs import LabelRules
from tokserve.text.tokenizer import Tokenizer

Side = str | Sequence[int]  # a text, or token ids


def counterparts(first: int, second: int) -> list[tuple[int, int]]:
    """The indexes of both sides of each pair, of so many entries: 1:1, 1:N or N:N.  Raises RequestError."""
    if first not in (1, second):
        raise RequestError(f"Input lengths must be either 1:1, 1:N or N:N, got {first}:{second}")
    return [(0 if first == 1 else index, index) for index in range(second)]


def check_scores_pairs(rules: LabelRules) -> None:
    """Raise RequestError for a classifier that does not score: one of several labels."""
    if rules.only_tokens:
        raise RequestError("this model labels tokens and cannot score pairs", field="model", code="unsupported")
    if len(rules.labels) != 1:
        raise RequestError(
            f"this model has {len(rules.labels)} labels, and scores need a model with one label",
            field="model",
            code="unsupported",
        )


def similarity(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """The cosine of two vectors."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    length = float(np.sqrt(np.dot(one, one) * np.dot(other, other)))
    return float(np.dot(one, other)) / length if length > 0 else 0.0


class PairPrompts:
    """Makes one prompt of a query and a document.

    `override`: the operator's template, which is given messages of the roles query and document, and of system with the
    instruction; without it the tokenizer's own form of a pair is used.  `special_tokens`: as of `ChatTemplate`.
    """

    def __init__(self, tokenizer: Tokenizer | None, override: str | None, special_tokens: Treatment = "allow") -> None:
        self._tokenizer = tokenizer
        self._override = override
        self._treatment = special_tokens

    @property
    def has_template(self) -> bool:
        """Whether the operator's template makes the prompts."""
        return self._override is not None

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self._override is None or self._tokenizer is None:
            return None
        return ChatTemplate(self._tokenizer, self._override, special_tokens=self._treatment)

    def pair(self, query: Side, document: Side, instruction: str | None = None) -> tuple[list[int], int]:
        """The pair's token ids, and from which on they are the document's, as in `TokenPrompt`; ids are joined as they
        are.  Raises RequestError."""
        if instruction is not None and self._template is None:
            raise RequestError(
                "instruction needs a template that shows it to the model (--chat-template)",
                field="instruction",
                code="unsupported",
            )
        if isinstance(query, str) and isinstance(document, str) and self._tokenizer is not None:
            if self._template is None:
                return self._tokenizer.encode_pair(query, document)
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            system = [] if instruction is None else [{"role": "system", "content": instruction}]
            return self._template.render(system + messages, add_generation_prompt=False), -1
        first = self.side(query, True)
        return [*first, *self.side(document, False)], len(first)

    def side(self, value: Side, first: bool = True) -> list[int]:
        """The ids of one side alone; `first`: with the tokenizer's special tokens."""
        if not isinstance(value, str):
            return list(value)
        if self._tokenizer is None:
            raise RequestError("texts need a tokenizer; without one (tokens_only) inputs are token ids")
        return self._tokenizer.encode(value, add_special_tokens=first)

    def cut(self, value: Side, limit: int) -> Side:
        """Cut a side after `limit` tokens; 0: not at all."""
        if not limit:
            return value
        ids = self.side(value, first=False)
        if len(ids) <= limit:
            return value
        assert self._tokenizer is not None or not isinstance(value, str)
        return self._tokenizer.decode(ids[:limit]) if isinstance(value, str) and self._tokenizer else ids[:limit]
