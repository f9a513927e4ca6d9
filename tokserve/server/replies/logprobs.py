"""Renders columns of logprobs in the formats of the routes.

The engine's columns stay columns in the formats "arrays" and "base64".  The format "objects" and OpenAI's
formats take a struct per token and alternative, and cost more.  In these and in "arrays" no value is below `FLOOR`:
JSON has no -inf, and clients expect this number.  Packed columns are exact.
"""

from __future__ import annotations

import base64
import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.client.outputs import Column
from tokserve.protocol.logprobs import Logprobs, stride_of, width_of
from tokserve.server.replies.reply_parts import PartEncoder, encode_list
from tokserve.text.token_texts import LOOKBACK, TokenTexts
from tokserve.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
NO_ROWS = Column(b"", stride_of(0))  # logprobs of no tokens
FLOOR = -9999.0  # the logprob of probability zero in JSON
T = TypeVar("T")
Named = Callable[[int], str]
Row = tuple[float, int, Sequence[int], Sequence[float]]  # logprob, rank, alternatives' ids and logprobs


class ChatAlternative(msgspec.Struct):
    """An alternative in chat."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A token in chat."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatAlternative]


class ChatLogprobs(msgspec.Struct):
    """The logprobs of a chat choice."""

    content: list[ChatLogprob]


class IdNames(dict[int, str]):
    """The names of tokens where a request wants ids."""

    def __missing__(self, token_id: int) -> str:
        return f"token_id:{token_id}"


def label_of(piece: bytes) -> str:
    """A token's bytes, as OpenAI writes those that are no text: `bytes:\\xf0\\x9f`."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Labels(dict[int, str]):
    """Names of tokens, different for different bytes: their texts, or their bytes if these end within a character."""

    def __init__(self, names: Mapping[int, str], pieces: Mapping[int, bytes]) -> None:
        super().__init__()
        self._names = names
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str:
        text = self._names[token_id]
        self[token_id] = text = label_of(self._pieces[token_id]) if text.endswith(REPLACEMENT) else text
        return text


class NoPieces(dict[int, bytes]):
    """The bytes of tokens where no tokenizer knows them: none."""

    def __missing__(self, token_id: int) -> bytes:
        return b""


def pieces_of(tokenizer: Tokenizer | None, skip_special_tokens: bool) -> Mapping[int, bytes]:
    """The bytes that tokens add to a text."""
    return NoPieces() if tokenizer is None else tokenizer.pieces(skip_special_tokens)


class Spelling:
    """The names of tokens in a text route: their text, or `token_id:<id>` on request or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._pieces = pieces_of(tokenizer, skip_special_tokens=False)
        self._as_ids = as_ids = as_ids or tokenizer is None
        texts = IdNames() if as_ids or tokenizer is None else tokenizer.texts(final=True)
        self.names: Mapping[int, str] = texts
        self._completed = texts if as_ids or tokenizer is None else tokenizer.texts(final=False)
        self._labels: Mapping[int, str] = self.names if as_ids else Labels(texts, self._pieces)

    def names_at(self, offset: TextOffset) -> Named:
        """Names tokens at an offset by what they add to the text there."""
        if self._as_ids or not offset.incomplete:
            return self._completed.__getitem__

        def name(token_id: int) -> str:
            return offset.text(self._pieces[token_id]) if offset.shows(token_id) else self._completed[token_id]

        return name

    def labels_at(self, offset: TextOffset) -> Named:
        """The same, with different names for different bytes: a token that ends within a character by its bytes."""
        if self._as_ids or not offset.incomplete:
            return self._labels.__getitem__

        def label(token_id: int) -> str:
            piece = self._pieces[token_id]
            if not offset.shows(token_id):
                return self._labels[token_id]
            return offset.text(piece) if offset.is_complete_after(piece) else label_of(piece)

        return label

    def bytes_label(self, token_id: int) -> str:
        """The token named by its bytes."""
        return label_of(self._pieces[token_id])

    def last_name(self, name: str, token_id: int, offset: TextOffset) -> str:
        """The name of the last token of a text, which may end within a character: then it has a U+FFFD there."""
        if self._as_ids:
            return name
        if not offset.shows(token_id):
            return REPLACEMENT + name if offset.incomplete else name
        return name if offset.is_complete_after(self._pieces[token_id]) else name + REPLACEMENT

    def bytes(self, token_id: int) -> list[int]:
        return list(self._pieces[token_id])


class TextOffset:
    """An offset in a choice's text, advanced token by token: the characters so far, and the bytes of an incomplete one.

    `pieces`: the bytes that tokens add to the text; b"" for skipped tokens.  `offset`: number of characters, below 0
    where the text lacks some that its tokens begin with.
    """

    def __init__(self, pieces: Mapping[int, bytes], offset: int = 0) -> None:
        self.offset = offset
        self._pieces = pieces
        self._rest = b""

    @property
    def incomplete(self) -> bool:
        """Whether a character has begun."""
        return bool(self._rest)

    def shows(self, token_id: int) -> bool:
        """Whether the token adds to the text: special tokens may not."""
        return bool(self._pieces[token_id])

    def text(self, piece: bytes) -> str:
        """What `piece` adds to the text: the characters that it completes, and U+FFFD for one that it does not
        continue."""
        return codecs.utf_8_decode(self._rest + piece, "replace", False)[0]

    def is_complete_after(self, piece: bytes) -> bool:
        """Whether no character is incomplete after `piece`."""
        return codecs.utf_8_decode(self._rest + piece, "replace", False)[1] == len(self._rest) + len(piece)

    def add(self, token_id: int) -> int:
        """Advance past a token; returns the offset at which its text begins."""
        begin = max(0, self.offset)
        piece = self._rest + self._pieces[token_id]
        text, used = codecs.utf_8_decode(piece, "replace", False)
        self.offset += len(text)
        self._rest = piece[used:]
        return begin


class TokenAlternative(msgspec.Struct, gc=False):
    """An alternative in the format "objects"; clients read either `token` or `token_id`."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    """A token in the format "objects"."""

    token: str
    token_id: int
    logprob: float
    rank: int
    bytes: list[int] | None
    top_logprobs: list[TokenAlternative]


class LogprobObjects(msgspec.Struct, gc=False):
    """Format "objects"."""

    content: list[TokenLogprob]


class PromptLogprob(msgspec.Struct, gc=False):
    """The logprob of a prompt token, or of an alternative to it."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class LogprobArrays(msgspec.Struct):
    """Format "arrays" as JSON numbers."""

    token_logprobs: list[float]
    ranks: list[int]
    top_token_ids: list[list[int]]
    top_logprobs: list[list[float]]
    mode: str
    start: int | UnsetType = UNSET


class PackedLogprobs(msgspec.Struct):
    """Little-endian float32 and int32 columns: base64 in JSON, byte strings in msgpack."""

    token_logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    shape: tuple[int, int]  # rows, alternatives per row
    mode: str
    start: int | UnsetType = UNSET


def rows(columns: Column) -> Iterator[Row]:
    """The columns token by token, with nothing below `FLOOR`."""
    ints, values = _pairs(columns)
    size = 1 + width_of(columns)
    if size == 1:
        for value, rank in zip(values, ints, strict=True):
            yield value, rank, [], []
        return
    for value, rank, end in zip(values[::size], ints[::size], range(size, len(ints) + size, size), strict=True):
        yield value, rank, ints[end - size + 1 : end], values[end - size + 1 : end]


def _pairs(columns: Column) -> tuple[list[int], list[float]]:
    """All pairs of the records, their integers and their numbers."""
    records = memoryview(columns.records)
    return records.cast("i")[::2].tolist(), _floored(records.cast("f")[1::2].tolist())  # type: ignore[arg-type]


def alternatives(row: Row, token_id: int, top: int) -> Iterator[tuple[int, float, int | None]]:
    """(id, logprob, rank) of the alternatives to a token: the `top` most probable, then those of logprob_token_ids.
    Equal logprobs share a rank; the rank of tokens of logprob_token_ids is unknown."""
    _, _, ids, values = row
    rank, last = 0, 1.0
    for offset, (other, value) in enumerate(zip(ids, values, strict=True)):
        if offset < top:
            if value != last:
                rank, last = offset + 1, value
            if other != token_id:
                yield other, value, rank
        elif other != token_id and other not in ids[:offset]:
            yield other, value, None


def packed(columns: Column, start: int | UnsetType = UNSET) -> PackedLogprobs:
    c = Logprobs.of(columns)
    return PackedLogprobs(
        c.token_logprobs.tobytes(),
        c.ranks.tobytes(),
        c.top_ids.tobytes(),
        c.top_logprobs.tobytes(),
        (columns.num_rows, c.width),
        c.mode,
        start,
    )


def arrays(columns: Column, start: int | UnsetType = UNSET) -> LogprobArrays:
    ints, values = _pairs(columns)
    size = 1 + width_of(columns)
    if size == 1:
        none: list[Any] = [[]] * len(ints)
        return LogprobArrays(values, ints, none, none, columns.form, start)
    ids, tops = _tops(ints, size), _tops(values, size)
    return LogprobArrays(values[::size], ints[::size], ids, tops, columns.form, start)


def _tops(values: list[T], size: int) -> list[list[T]]:
    """The alternatives' part of all tokens' `size` pairs, as a list per token."""
    return [values[i + 1 : i + size] for i in range(0, len(values), size)]


def clamped(column: bytes) -> list[float]:
    """A float32 column as numbers that JSON can represent."""
    return _floored(memoryview(column).cast("f").tolist())  # type: ignore[arg-type]


def _floored(values: list[float]) -> list[float]:
    return [max(FLOOR, value) for value in values] if values and min(values) < FLOOR else values


def objects(columns: Column, token_ids: Sequence[int], top: int, spelling: Spelling | None = None) -> LogprobObjects:
    """An entry per token, with the token as the first alternative.  Without `spelling` tokens are named by ids."""
    entries = []
    for token_id, row in zip(token_ids, rows(columns), strict=True):
        token = _alternative(token_id, row[0], row[1], spelling)
        tops = [token]
        if row[2]:
            tops += [_alternative(*other, spelling) for other in alternatives(row, token_id, top)]
        entries.append(TokenLogprob(token.token, token_id, token.logprob, row[1], token.bytes, tops))
    return LogprobObjects(entries)


def _alternative(token_id: int, logprob: float, rank: int | None, spelling: Spelling | None) -> TokenAlternative:
    if spelling is None:
        return TokenAlternative(f"token_id:{token_id}", token_id, logprob, rank)
    return TokenAlternative(spelling.names[token_id], token_id, logprob, rank, spelling.bytes(token_id))


def prompt_objects(
    columns: Column, prompt_ids: Sequence[int], start: int, top: int, texts: TokenTexts | None = None
) -> list[dict[str, PromptLogprob] | None]:
    """[null, {"<id>": {"logprob", "rank", "decoded_token"}}, ...]: an entry per prompt token, its own id first.

    The first token and those before `start` have no entry, nor have the tokens of a prompt that was not computed.
    `top`: number of alternatives.  `texts`: of tokens at their places.
    """
    first = _first(columns, prompt_ids, start)
    return [None] * first + _scores(columns, prompt_ids, range(first, len(prompt_ids)), top, texts)


def _scores(
    columns: Column, prompt_ids: Sequence[int], places: range, top: int, texts: TokenTexts | None
) -> list[dict[str, PromptLogprob] | None]:
    """The entries of the prompt's tokens at these places."""
    entries: list[dict[str, PromptLogprob] | None] = []
    for place, row in zip(places, rows(columns), strict=True):
        token_id = prompt_ids[place]
        name = None if texts is None else texts.after(prompt_ids[max(0, place - LOOKBACK) : place])
        entry = {str(token_id): PromptLogprob(row[0], row[1], name(token_id) if name else None)}
        for other, value, rank in alternatives((*row[:2], row[2][:top], row[3][:top]), token_id, top):
            entry[str(other)] = PromptLogprob(value, rank, name(other) if name else None)
        entries.append(entry)
    return entries


def _first(columns: Column, prompt_ids: Sequence[int], start: int) -> int:
    """The index of the first prompt token with an entry."""
    return min(max(1, start), len(prompt_ids)) if columns.records else len(prompt_ids)


def prompt_objects_encoder(
    columns: Column, prompt_ids: Sequence[int], start: int, top: int, texts: TokenTexts | None = None
) -> PartEncoder:
    first = _first(columns, prompt_ids, start)

    def make(begin: int, end: int) -> list[dict[str, PromptLogprob] | None]:
        nones = max(0, min(end, first) - begin)
        scores = columns.part(max(0, begin - first), max(0, end - first))
        return [None] * nones + _scores(scores, prompt_ids, range(begin + nones, end), top, texts)

    return lambda: encode_list(len(prompt_ids), top, make)


def objects_encoder(
    columns: Column, token_ids: Sequence[int], top: int, spelling: Spelling | None = None
) -> PartEncoder:
    def make(begin: int, end: int) -> list[TokenLogprob]:
        return objects(columns.part(begin, end), token_ids[begin:end], top, spelling).content

    return lambda: _content(encode_list(len(token_ids), width_of(columns), make))


def content_encoder(columns: Column, token_ids: Sequence[int], spelling: Spelling) -> PartEncoder:
    def make(begin: int, end: int) -> list[ChatLogprob]:
        return content(columns.part(begin, end), token_ids[begin:end], spelling).content

    return lambda: _content(encode_list(len(token_ids), width_of(columns), make))


def _content(entries: Iterator[bytes]) -> Iterator[bytes]:
    yield b'{"content":'
    yield from entries
    yield b"}"


def content(columns: Column, token_ids: Sequence[int], spelling: Spelling) -> ChatLogprobs:
    """The logprobs of a chat choice: the top alternatives (with the token if it is one), then logprob_token_ids."""
    entries = []
    names, bytes_of = spelling.names, spelling.bytes
    for token_id, (logprob, _, ids, values) in zip(token_ids, rows(columns), strict=True):
        tops = [ChatAlternative(names[other], value, bytes_of(other)) for other, value in zip(ids, values, strict=True)]
        entries.append(ChatLogprob(names[token_id], logprob, bytes_of(token_id), tops))
    return ChatLogprobs(entries)


class PackedTopLogprobs(msgspec.Struct):
    """The most probable tokens, with their logprobs: base64 of little-endian [tokens, k] in the order of the engine."""

    shape: list[int]
    token_ids_b64: str
    logprobs_b64: str
    token_ids_dtype: str = "<i4"
    logprobs_dtype: str = "<f4"

    @classmethod
    def of(cls, columns: Column | None, top: int) -> PackedTopLogprobs:
        """The alternatives to the tokens of these columns; None: there are no tokens."""
        if columns is None:
            return cls([0, top], "", "")
        c = Logprobs.of(columns)
        ids, values = (base64.b64encode(array.tobytes()).decode() for array in (c.top_ids, c.top_logprobs))
        return cls([columns.num_rows, c.width], ids, values)


class TextLogprobs(msgspec.Struct):
    """The logprobs of a completions choice, a column per kind.  With `packed_top_logprobs`, `top_logprobs` is empty."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []
    packed_top_logprobs: PackedTopLogprobs | UnsetType = UNSET

    def add(
        self,
        columns: Column | None,
        token_ids: Sequence[int],
        spelling: Spelling,
        offset: TextOffset,
        top: int,
        *,
        is_last: bool = False,
    ) -> None:
        """Append tokens with their first `top` alternatives; without columns, tokens that have no logprobs.  `offset`:
        where in the choice's text they begin; it is advanced to their end.  `is_last`: the text ends with them.

        The names of tokens are what they add to the text; alternatives have different names."""
        table = [None] * len(token_ids) if columns is None else rows(columns)
        for number, (token_id, row) in enumerate(zip(token_ids, table, strict=True), 1):
            name = spelling.names_at(offset)(token_id)
            if is_last and number == len(token_ids):
                name = spelling.last_name(name, token_id, offset)
            self.tokens.append(name)
            if row is None:
                self.token_logprobs.append(None)
                self.top_logprobs.append(None)
            else:
                logprob, _, ids, values = row
                self.token_logprobs.append(logprob)
                named = {name: logprob}
                label = spelling.labels_at(offset)
                for place, (other, value) in enumerate(zip(ids[:top], values[:top], strict=True)):
                    if other != token_id:
                        text = label(other)
                        if text in named and ids.index(other) == place:  # another token's name, not its own from before
                            text = spelling.bytes_label(other)
                        named.setdefault(text, value)
                self.top_logprobs.append(named)
            self.text_offset.append(offset.add(token_id))
