"""Parses logprobs of generate replies into columns: the inverse of `logprobs`, for `derender`.

"arrays" and "base64" are columns already.  In "objects" the alternatives leave out the token itself: whether it is
among the most probable follows from the number of alternatives.  Raises `RequestError`s with the field's path.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from tokserve.base.errors import invalid
from tokserve.client.outputs import Column
from tokserve.protocol.logprobs import logprob_column, width_of
from tokserve.server.http import body, errors

Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
Value = Annotated[float, Meta(ge=-3e38, le=3e38)]
NAME = "token_id:"


class ParsedAlternative(msgspec.Struct):
    """A token of the format "objects": `token_id`, or `token` "token_id:<id>"."""

    logprob: Value
    token: str = ""
    token_id: Id | None = None
    rank: Id | None = None


class ParsedEntry(ParsedAlternative):
    """An output token."""

    top_logprobs: list[ParsedAlternative] = []


class ParsedObjects(msgspec.Struct):
    """Format "objects"."""

    content: list[ParsedEntry]


class ParsedScore(msgspec.Struct):
    """A prompt token or an alternative to it."""

    logprob: Value
    rank: Id | None = None


class ParsedArrays(msgspec.Struct):
    """Format "arrays"."""

    token_logprobs: list[Value]
    ranks: list[Id]
    top_token_ids: list[list[Id]]
    top_logprobs: list[list[Value]]


class ParsedColumns(msgspec.Struct):
    """Format "base64"."""

    token_logprobs: bytes
    ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes
    shape: tuple[Id, Id]


class ParsedRow(NamedTuple):
    """A token, the most probable others in order, and those of logprob_token_ids."""

    token_id: int
    logprob: float
    rank: int | None
    others: list[tuple[int, float]]
    named: dict[int, float]


def parse_output(value: Any, ids: Sequence[int], top: int | None, named: Sequence[int], field: str) -> Column:
    """Parse logprobs of the tokens `ids` with `top` alternatives, then those of the ids `named`.  `top`: -1: all
    tokens; None: not known, so of "objects", which do not say how many there were, none are kept."""
    if isinstance(value, dict) and "content" in value:
        entries = body.convert(value, ParsedObjects, field).content
        rows = [_row(entry, bool(named), f"{field}.content[{i}]") for i, entry in enumerate(entries)]
        if [row.token_id for row in rows] != list(ids):
            raise invalid(f"{field}.content", "must be of the tokens in token_ids")
        if top is None:
            return _columns([row._replace(others=[], named={}) for row in rows], 0, (), f"{field}.content")
        return _columns(rows, top, named, f"{field}.content")
    columns = _table(value, field)
    if columns.num_rows != len(ids):
        raise invalid(field, "must have a row per token")
    _check_width(columns, top, len(named), field)
    return columns


def parse_prompt(value: Any, ids: Sequence[int], top: int, field: str) -> Column | None:
    """Parse logprobs of the prompt `ids` with `top` alternatives (-1: all tokens); None for a prompt without any."""
    if not isinstance(value, list):
        columns = _table(value, field)
        if columns.records:
            _check_width(columns, top, 0, field)
        return columns if columns.records else None
    if len(value) != len(ids):
        raise invalid(field, "must have an entry per prompt token")
    rows = []
    for index, entry in enumerate(value):
        if entry is not None:
            rows.append(_prompt_row(entry, ids[index], f"{field}[{index}]"))
    return _columns(rows, top, (), field) if rows else None


def _prompt_row(entry: Any, token_id: int, field: str) -> ParsedRow:
    try:
        scores = msgspec.convert(entry, dict[Id, ParsedScore], str_keys=True)
    except msgspec.ValidationError as error:
        raise errors.from_msgspec(error, (), field) from None
    score = scores.pop(token_id, None)
    if score is None:
        raise invalid(field, f"must have the prompt's own token {token_id}")
    return ParsedRow(token_id, score.logprob, score.rank, [(i, other.logprob) for i, other in scores.items()], {})


def _row(entry: ParsedEntry, with_names: bool, field: str) -> ParsedRow:
    """`with_names`: alternatives without a rank are those of logprob_token_ids."""
    own_id = _id(entry, field)
    others, named = [], {}
    for index, alternative in enumerate(entry.top_logprobs):
        token_id = _id(alternative, f"{field}.top_logprobs[{index}]")
        if token_id == own_id:
            continue
        if with_names and alternative.rank is None:
            named[token_id] = alternative.logprob
        else:
            others.append((token_id, alternative.logprob))
    return ParsedRow(own_id, entry.logprob, entry.rank, others, named)


def _id(entry: ParsedAlternative, field: str) -> int:
    if entry.token_id is not None:
        return entry.token_id
    digits = entry.token.removeprefix(NAME)
    if not entry.token.startswith(NAME) or not digits.isdecimal() or len(digits) > 9:
        raise invalid(f"{field}.token_id", "is required")
    return int(digits)


def _columns(rows: list[ParsedRow], top: int, named: Sequence[int], field: str) -> Column:
    width = top if top >= 0 else 1 + max((len(row.others) for row in rows), default=0)
    logprobs, ranks, ids, values = array("f"), array("i"), array("i"), array("f")
    for index, row in enumerate(rows):
        others = row.others
        if len(others) == width - 1:  # the token itself is the missing alternative
            others = _insert_token(row)
        if len(others) != width:
            where = f"{field}[{index}]"
            raise invalid(where, f"must have {width} alternatives, got {len(others)}")
        known = {row.token_id: row.logprob, **dict(others), **row.named}
        for name in named:
            if name not in known:
                where = f"{field}[{index}]"
                raise invalid(where, f"lacks token {name} of logprob_token_ids")
        logprobs.append(row.logprob)
        ranks.append(row.rank or 0)
        ids.extend([*(token for token, _ in others), *named])
        values.extend([*(value for _, value in others), *(known[name] for name in named)])
    return _packed(logprobs.tobytes(), ranks.tobytes(), ids.tobytes(), values.tobytes(), width + len(named))


def _packed(token_logprobs: bytes, ranks: bytes, top_ids: bytes, top_logprobs: bytes, width: int) -> Column:
    """The column of packed arrays: two of a value per token, two of `width`."""
    values, tops = np.frombuffer(token_logprobs, "<f4"), np.frombuffer(top_logprobs, "<f4")
    ids = np.frombuffer(top_ids, "<i4").reshape(-1, width) if width else np.zeros((len(values), 0), np.int32)
    return logprob_column(values, np.frombuffer(ranks, "<i4"), ids, tops.reshape(ids.shape))


def _insert_token(row: ParsedRow) -> list[tuple[int, float]]:
    """The alternatives with the token inserted by its rank, which equal logits share in the order of ids.  (Different
    logits may have equal logprobs: then ids are in no order.)"""
    above = sum(value > row.logprob for _, value in row.others)
    equals = [token for token, value in row.others if value == row.logprob]
    position = min((row.rank or 1) - 1, above + len(equals))
    if position <= above:
        position = above + (bisect(equals, row.token_id) if equals == sorted(equals) else 0)
    return [*row.others[:position], (row.token_id, row.logprob), *row.others[position:]]


def _table(value: Any, field: str) -> Column:
    """Parse "arrays" or "base64"."""
    if isinstance(value, dict) and "shape" in value:
        packed = body.convert(value, ParsedColumns, field)
        count, width = packed.shape
        arrays = (packed.token_logprobs, packed.ranks, packed.top_token_ids, packed.top_logprobs)
    else:
        lists = body.convert(value, ParsedArrays, field)
        count, width = len(lists.ranks), len(lists.top_token_ids[0]) if lists.top_token_ids else 0
        arrays = (
            array("f", lists.token_logprobs).tobytes(),
            array("i", lists.ranks).tobytes(),
            array("i", (i for row in lists.top_token_ids for i in row)).tobytes(),
            array("f", (v for row in lists.top_logprobs for v in row)).tobytes(),
        )
    if list(map(len, arrays)) != [4 * count, 4 * count, 4 * count * width, 4 * count * width]:
        raise invalid(field, "must have columns of equal length")
    return _packed(*arrays, width)


def _check_width(columns: Column, top: int | None, named: int, field: str) -> None:
    width = width_of(columns)
    if columns.records and top not in (None, -1) and width != (top or 0) + named:
        raise invalid(field, f"must have {top + named} alternatives per token, got {width}")
