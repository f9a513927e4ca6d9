"""Output values: the carrier of values per new token, and the declarations of these and of values once per request.

A column has a record for each token: numbers of 4 bytes, int32 or the bits of float32.  On its way from the device to
the engine's socket it is an array with a row per token of the step (`ColumnRows`), from there on it is bytes
(`Column`) that are cut and joined without being interpreted.  A request's record is the beginning of the step's, which
is as long as the longest.  A ragged column also has items: int32 numbers, as many for each token as the first number of
its record says, and none if that is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.prompt import unpack_ids

Int32 = NDArray[np.int32]
Task = SamplingParams | PoolingParams

LOGPROBS = "logprobs"  # names of the columns and values that the core has
PROMPT_LOGPROBS = "prompt_logprobs"
NUMBER_BYTES = 24  # of a number in a reply's JSON, with what stands around it, about


class ColumnRows(msgspec.Struct, frozen=True):
    """Values of n tokens of a step.  `items`: of a ragged column, all tokens' items one after the other."""

    records: Int32  # [n, numbers]
    items: Int32 | None = None

    def take(self, kept: NDArray[np.bool_]) -> ColumnRows:
        """The rows where `kept` [n] is true."""
        items = self.items
        if items is not None:
            items = items[np.repeat(kept, np.maximum(self.records[:, 0], 0))]
        return ColumnRows(self.records[kept], items)


class Column(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Packed values of n tokens, little-endian.

    `records`: n records of `stride` bytes.  `items`: of a ragged column.  `form`: what the numbers mean, where there
    are several kinds of them: of logprobs, their mode.
    """

    records: bytes = b""
    stride: int = 4
    items: bytes = b""
    form: str = ""

    @property
    def num_rows(self) -> int:
        return len(self.records) // self.stride

    @property
    def num_bytes(self) -> int:
        """The size of all values."""
        return len(self.records) + len(self.items)

    def part(self, start: int, end: int) -> Column:
        """The rows from `start` to before `end`."""
        stride = self.stride
        records = self.records[start * stride : end * stride]
        if not self.items:
            return Column(records, stride, b"", self.form)
        offsets = item_offsets(np.frombuffer(self.records, "<i4").reshape(-1, stride // 4))
        end = min(end, len(offsets) - 1)
        return Column(records, stride, self.items[offsets[start] : offsets[end]], self.form)


def item_offsets(records: Int32) -> list[int]:
    """Where the items of each record [n, numbers] begin, and where the last ones end, in bytes."""
    return [0, *(4 * np.maximum(records[:, 0], 0)).cumsum().tolist()]


def join(parts: Sequence[Column]) -> Column:
    """The rows of all parts, of which there is at least one, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    records, items = b"".join([part.records for part in parts]), b"".join([part.items for part in parts])
    return Column(records, first.stride, items, first.form)


class RowColumn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A column of rows of a step that have the same stride and form: `column` holds their new tokens one after the
    other.  `rows`: int32 indexes, ascending; empty: all rows of the step.
    """

    name: str
    column: Column
    rows: bytes = b""

    def scatter(self, counts: list[int], to: list[dict[str, Column]]) -> None:
        """Add each row's part, under the name, at its index of `to`, where an empty dictionary may be shared;
        `counts`: tokens of every row of the step."""
        name, column = self.name, self.column
        records, stride, items, form = column.records, column.stride, column.items, column.form
        offsets = item_offsets(np.frombuffer(records, "<i4").reshape(-1, stride // 4)) if items else None
        end = 0
        for row in unpack_ids(self.rows) if self.rows else range(len(counts)):
            start, end = end, end + counts[row]
            of_row = b"" if offsets is None else items[offsets[start] : offsets[end]]
            part = Column(records[start * stride : end * stride], stride, of_row, form)
            if to[row]:
                to[row][name] = part
            else:
                to[row] = {name: part}


class RecordForm(NamedTuple):
    """How the records of a request's column look: bytes of each, and the column's form."""

    stride: int
    form: str = ""


class Collector(Protocol):
    """Gathers a value of one request from the steps that compute its positions."""

    def add(self, start: int, end: int, values: NDArray[Any]) -> None:
        """A step has computed the positions from `start` to before `end`, and brought these values."""

    def packed(self, num_tokens: int) -> Any:
        """The value as it is sent, of a request with so many tokens of prompt and output; None: there is none."""


class ReplyLimits(NamedTuple):
    """What bounds the values of a reply: tokens of a context, ids of the vocabulary, items of a record, and the facts
    of the loaded model."""

    context: int
    vocab_size: int
    max_items: int
    facts: Mapping[str, Any]


TokenBytes = Callable[[SamplingParams, ReplyLimits], int]
ChoiceBytes = Callable[[SamplingParams, int, ReplyLimits], int]


@dataclass(frozen=True)
class ColumnSpec:
    """Declares values per new token.

    `form_of`: the form of the records that a task asks for, of a model with so many ids and this mode of logprobs;
    None: it asks for none.  `count`: a number of rows that is summed up over a choice's tokens, for its last output.
    `result`: attributes of the Python API's outputs, from a `ChoiceOutput`; none if that does not have the column.
    `source`: the import string of the class that computes the records (see `runner.columns.TokenSource`).  `reply`: the
    import string of what replies write (see `server.replies.fields.FieldWriter`).  `asked_by`: the sampling parameter
    that asks for it.  `token_bytes`: the most bytes that a reply has of a token, about.
    """

    name: str
    form_of: Callable[[Task, int, str], RecordForm | None]
    count: Callable[[Column], int] | None = None
    result: Callable[[Any], dict[str, Any]] | None = None
    source: str = ""
    reply: str = ""
    asked_by: str = ""
    token_bytes: TokenBytes | None = None


@dataclass(frozen=True)
class ValueSpec:
    """Declares a value that a request has once; it is sent with the last output.

    `collect`: makes the collector, for a task and the length of its prompt, of values that steps bring; None: a feature
    of the engine sets it.  `read`: the value as outputs have it, from what was sent and the number of tokens of prompt
    and output.  `result`, `reply`, `asked_by`: as in `ColumnSpec`.  `choice_bytes`: the most bytes that a reply, or the
    last event of a stream, has of a choice with so many tokens of prompt and output, about.
    """

    name: str
    collect: Callable[[Task, int], Collector] | None = None
    read: Callable[[Any, int], Any] = lambda value, num_tokens: value
    result: Callable[[Any], dict[str, Any]] | None = None
    reply: str = ""
    asked_by: str = ""
    choice_bytes: ChoiceBytes | None = None
