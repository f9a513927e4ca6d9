"""Turns token ids into text while they arrive; text that was returned is final.

Three things are held back until they are decided: the bytes of an incomplete character, a run of byte-fallback
tokens (one wrong byte changes how the whole run decodes), and text that may be the beginning of a stop string.
The joined deltas equal `Tokenizer.continuation` of all ids: an output continues its prompt, so a leading space belongs
to it.  A stop match does not depend on how the ids were split into pushes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokserve.text.stops import Reasoning, StopStrings
from tokserve.text.tokenizer import Tokenizer

_MAX_HELD = 16  # limit of tokens held for the end of a character, with a decoder of unknown kind


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was found; `index` is the output token (from 0) whose text completed it."""

    text: str
    index: int


class _TextStream(Protocol):
    """The final text of ids that arrive in portions; `rewind` goes back to a `mark`."""

    def feed(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...
    def mark(self) -> Any: ...
    def rewind(self, mark: Any) -> None: ...


class _ByteStream:
    """Decodes byte-level vocabularies: the bytes of the tokens pass through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._piece = tokenizer.pieces(skip_special).__getitem__
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._piece, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)

    def mark(self) -> Any:
        return self._utf8.getstate()

    def rewind(self, mark: Any) -> None:
        self._utf8.setstate(mark)


class _WindowStream:
    """Decodes any other vocabulary: the new tokens together with the last final one, whose text is subtracted.  How a
    token decodes depends on whether there is one before it (leading space), not on which."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, spaces: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._spaces = spaces
        self._anchor = tokenizer.context  # final tokens whose text is not empty
        self._anchor_len = len(self._decode(self._anchor))
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        known = self._tokenizer.spelling
        kept = [token for token in ids if token not in self._skip and known(token) is not None]
        if self._spaces:
            return self._extend(kept)
        return "".join(map(self._join_special, kept))

    def _extend(self, ids: list[int]) -> str:
        self._pending += ids
        ready = len(self._pending)
        while ready and self._pending[ready - 1] in self._tokenizer.byte_ids:
            ready -= 1
        return self._flush(ready, final=False) if ready else ""

    def _join_special(self, token: int) -> str:
        """One token; consecutive added tokens are joined without spaces."""
        added = self._tokenizer.added_ids
        if token in added and not self._pending and self._anchor and self._anchor[-1] in added:
            text = self._tokenizer.spelling(token) or ""
            self._anchor, self._anchor_len = [token], len(self._decode([token]))
            return text
        return self._extend([token])

    def _flush(self, ready: int, final: bool) -> str:
        window = self._anchor + self._pending[:ready]
        text = self._decode(window)
        unfinished = not final and text.endswith("\ufffd") and not self._tokenizer.byte_ids
        if unfinished and ready <= _MAX_HELD:
            return ""
        delta = text[self._anchor_len :]
        del self._pending[:ready]
        for count in range(1, len(window) + 1):
            text = self._decode(window[-count:])
            if text:
                window = window[-count:]
                break
        self._anchor, self._anchor_len = window, len(text)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def finish(self) -> str:
        return self._flush(len(self._pending), final=True) if self._pending else ""

    def mark(self) -> Any:
        return self._anchor, self._anchor_len, list(self._pending)

    def rewind(self, mark: Any) -> None:
        self._anchor, self._anchor_len, self._pending = mark


class Detokenizer:
    """The text of one output, and where a stop string ends it.

    `stop`: strings, or their automaton if several outputs have the same.  The match that ends first wins; of those that
    end together, the longest.  A match that is complete within the first `min_tokens` tokens does not count.
    `include_stop`: the stop string is part of the text.
    `stop_after`: the two markers of reasoning, in which no match counts (`Reasoning`).
    `spaces_between_special` False: consecutive special tokens are joined without the spaces some decoders insert.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] | StopStrings = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        spaces_between_special: bool = True,
        min_tokens: int = 0,
        stop_after: Sequence[str] = (),
    ) -> None:
        if tokenizer.is_byte_level:
            self._stream: _TextStream = _ByteStream(tokenizer, skip_special)
        else:
            self._stream = _WindowStream(tokenizer, skip_special, skip_special or spaces_between_special)
        self._stop = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._reasoning = Reasoning(*stop_after) if stop_after else None  # that has not ended
        self._begin = self._stream.mark()
        self._undecided: list[int] = []  # all ids, while the output may begin with reasoning
        self._count = 0  # tokens pushed
        self._held = ""
        self._floor = 0  # a match must end after this many characters of the held text
        self.hit: StopHit | None = None

    def push(self, ids: Sequence[int], final: bool = False) -> tuple[str, StopHit | None]:
        """Text that is final now, and the stop match if this push completed one (later pushes return nothing).
        `final`: these are the last ids; nothing stays held."""
        if not self._stop:
            text = self._stream.feed(ids)
            return (text + self._stream.finish() if final else text), None
        if self.hit:
            return "", None
        early = self._min_tokens - self._count
        if 0 < early < len(ids):
            before, _ = self._advance(ids[:early], False)
            after, hit = self._advance(ids[early:], final)
            return before + after, hit
        return self._advance(ids, final)

    def _advance(self, ids: Sequence[int], final: bool) -> tuple[str, StopHit | None]:
        start = self._stream.mark()
        text = self._held + self._stream.feed(ids)
        first, self._count = self._count, self._count + len(ids)
        if 0 < self._count <= self._min_tokens:
            self._floor = len(text)
        if final:
            text += self._stream.finish()
        if self._reasoning is not None and not self._reasoning.begun:
            self._undecided += ids
        thought = self._thought(text, final)
        match = None if self._reasoning else self._stop.find(text[thought:], max(0, self._floor - thought))
        if match is None:
            cut = thought if self._reasoning else len(text) if final else thought + self._stop.safe(text[thought:])
            self._held = text[cut:]
            self._floor = max(0, self._floor - cut)
            if self._reasoning is None or self._reasoning.begun:
                self._undecided = []
            return text[:cut], None
        begin, end = match[0] + thought, match[1] + thought
        if self._undecided:  # nothing was returned yet
            self._stream.rewind(self._begin)
            index = self._completing(self._undecided, end)
        else:
            self._stream.rewind(start)
            index = first + self._completing(ids, end - len(self._held))
        self.hit = StopHit(text[begin:end], max(index, 0))
        return text[: end if self._include_stop else begin], self.hit

    def _thought(self, text: str, final: bool) -> int:
        """The length of the reasoning that `text` begins with."""
        if self._reasoning is None:
            return 0
        end, ended = self._reasoning.end(text, final=final)
        if ended:
            self._reasoning = None
        return end

    def _completing(self, ids: Sequence[int], length: int) -> int:
        """The index of the first of `ids` after which `length` characters are final."""
        for index, token in enumerate(ids):
            length -= len(self._stream.feed((token,)))
            if length <= 0:
                return index
        return len(ids) - 1
