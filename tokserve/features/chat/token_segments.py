"""Assigns the tokens of an answer to the segments that its text is parsed into.

A token belongs to the segment that has its text.  A marker that ends a segment belongs to that segment, and the text
around the name and the arguments of a call to the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokserve.features.chat.output_format import Kind
from tokserve.features.chat.parsing import Parser
from tokserve.server.replies.logprobs import ChatLogprob, TextOffset


class OutputToken(NamedTuple):
    """A token of an answer: the number of characters that it completes, and its logprobs if requested."""

    length: int
    entry: ChatLogprob | None


class TokenSegment(NamedTuple):
    """A segment with its tokens.  `before`: tokens that belong to what came before it."""

    kind: Kind
    text: str
    tokens: list[OutputToken]
    before: list[OutputToken]


class _TokenSplitter:
    """Splits an answer's text where tokens end, so that each token is assigned to the item that has its text."""

    def __init__(self, offset: TextOffset) -> None:
        self._position = offset
        # tokens whose text has not arrived, and the offsets of their ends
        self._waiting: deque[tuple[int, OutputToken]] = deque()
        self._text = ""  # of the next token, incomplete
        self._at = 0  # offset of `_text`

    def push(
        self, text: str, token_ids: Sequence[int], entries: Sequence[ChatLogprob] | None, final: bool
    ) -> Iterator[tuple[str, list[OutputToken]]]:
        """The complete pieces of text with their tokens; with `final`, the rest."""
        text, at = self._text + text, self._at
        for i, token_id in enumerate(token_ids):
            before = self._position.offset
            self._position.add(token_id)
            self._waiting.append(
                (self._position.offset, OutputToken(self._position.offset - before, entries[i] if entries else None))
            )
        begin = 0
        while self._waiting and self._waiting[0][0] - at <= len(text):
            end, token = self._waiting.popleft()
            yield text[begin : end - at], [token]
            begin = end - at
        if final or not self._waiting:
            yield text[begin:], [token for _, token in self._waiting]
            begin = len(text)
            self._waiting.clear()
        self._text, self._at = text[begin:], at + begin


class SegmentReader:
    """Reads one answer.  `offset`: to assign tokens; None: segments have none.

    `reasoning_tokens`: of the thoughts so far, with their markers.  `rest`: after `finish`, the tokens that belong to
    what came last.
    """

    def __init__(self, parser: Parser, offset: TextOffset | None) -> None:
        self.reasoning_tokens = 0
        self.rest: list[OutputToken] = []
        self._parser = parser
        self._splitter = None if offset is None else _TokenSplitter(offset)
        self._held: list[OutputToken] = []  # tokens whose text the parser holds
        self._kind: Kind | None = None  # what is being written
        self._num_thoughts = 0  # that have ended
        self._of_thought = 0  # held tokens that belong to the last of them

    def read(
        self, text: str, token_ids: Sequence[int], entries: Sequence[ChatLogprob] | None, *, final: bool
    ) -> Iterator[TokenSegment]:
        """The segments of a delta of the answer, the last with `final`.  `entries`: the tokens' logprobs, if they are
        shown."""
        if self._splitter is None:
            yield from self._parse(text, False)
        else:
            for piece, tokens in self._splitter.push(text, token_ids, entries, final):
                self._held += tokens
                yield from self._parse(piece, False)

    def finish(self) -> Iterator[TokenSegment]:
        """The segments at the end of the answer."""
        yield from self._parse("", True)
        self.rest, self._held = self._held, []
        self._count(self._kind, self.rest)

    def _parse(self, piece: str, final: bool) -> Iterator[TokenSegment]:
        for kind, text in self._parser.push(piece, final):
            before, tokens = self._divided(kind, text)
            self._held, self._of_thought = [], 0
            self._count(self._kind, before)
            self._kind = "call" if kind == "arguments" else kind
            self._count(self._kind, tokens)
            yield TokenSegment(kind, text, tokens, before)
        if self._parser.num_thoughts > self._num_thoughts:
            self._num_thoughts, self._of_thought = self._parser.num_thoughts, len(self._held)

    def _count(self, kind: Kind | None, tokens: Sequence[OutputToken]) -> None:
        if kind == "reasoning":
            self.reasoning_tokens += len(tokens)

    def _divided(self, kind: Kind, text: str) -> tuple[list[OutputToken], list[OutputToken]]:
        """The held tokens before the text of a segment, and those from there on."""
        held = self._held
        if kind == "call" and self._kind == "reasoning":
            return held[: self._of_thought], held[self._of_thought :]
        if self._kind is None or kind in (self._kind, "call", "arguments"):
            return [], held
        first, missing = len(held), len(text) + (len(self._parser.opens) if kind == "reasoning" else 0)
        while first and (missing > 0 or not held[first - 1].length):
            first -= 1
            missing -= held[first].length
        return held[:first], held[first:]
