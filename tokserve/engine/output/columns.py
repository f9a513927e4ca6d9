"""Output on its way to the front end: columns and prompt logprobs of one request, and a step's message.

A step's records are as long as those of its widest row; a request keeps its own length, as packed bytes that are
joined, never as objects per token.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from tokserve.protocol.columns import Column, ColumnRows, Int32, RecordForm, RowColumn, item_offsets
from tokserve.protocol.messages import Finish, RareFields, StepOutput, StepStats


class StepRows:
    """A column of a step's sampled tokens as bytes, so that taking a row out of it is a slice."""

    __slots__ = ("items", "offsets", "records", "stride")

    def __init__(self, rows: ColumnRows) -> None:
        self.records = rows.records.tobytes()
        self.stride = 4 * rows.records.shape[1]
        self.items = b"" if rows.items is None else rows.items.tobytes()
        self.offsets = None if rows.items is None else item_offsets(rows.records)


class ColumnBuffer:
    """Rows of one column that are not yet sent, in order.  The newest step's rows are copied when the next step's come,
    or straight to where they are moved: those of a stream are thus copied once."""

    __slots__ = ("_items", "_newest", "_records", "form", "kind", "name", "stride")

    def __init__(self, name: str, form: RecordForm) -> None:
        self.name = name
        self.form = form
        self.stride = form.stride
        self.kind = (name, form)
        self._newest: tuple[StepRows, int, int] | None = None  # rows, first, count
        self._records = bytearray()
        self._items = bytearray()

    def append(self, rows: StepRows, first: int, count: int = 1) -> None:
        """Append `count` rows of a step from `first` on."""
        if self._newest is not None:
            self._copy(*self._newest)
        self._newest = (rows, first, count)

    def _copy(self, rows: StepRows, first: int, count: int) -> None:
        stride, records = rows.stride, rows.records
        if stride == self.stride:
            self._records += records[stride * first : stride * (first + count)]
        else:
            for start in range(stride * first, stride * (first + count), stride):
                self._records += records[start : start + self.stride]
        if rows.offsets is not None:
            self._items += rows.items[rows.offsets[first] : rows.offsets[first + count]]

    def move(self, to: ColumnBuffer) -> None:
        """Append all rows to those of another of the same kind; none are left here."""
        if self._records:
            to._records += self._records
            to._items += self._items
            self._records.clear()
            self._items.clear()
        if self._newest is not None:
            to._copy(*self._newest)
            self._newest = None

    def packed(self) -> Column:
        if self._newest is not None:
            self._copy(*self._newest)
            self._newest = None
        return Column(bytes(self._records), self.stride, bytes(self._items), self.form.form)


class PromptRows:
    """The logprobs of a prompt's tokens from `first` to the last, as chunks bring them."""

    __slots__ = ("_end", "_first", "_form", "_records", "is_finite", "next")

    def __init__(self, form: RecordForm, first: int, end: int) -> None:
        self._form = form
        self._first, self._end = min(first, end), end
        self.restart()

    def restart(self) -> None:
        """The logprobs come again, from the first one on."""
        self.next = self._first  # the prompt token whose row comes next
        self.is_finite = True  # no logprob is NaN
        self._records = bytearray()

    def add(self, start: int, records: Int32) -> None:
        """Keep the records [n, numbers] that a chunk from position `start` brought, except those kept before a
        preemption."""
        known = self.next - max(start + 1, self._first)
        assert known >= 0, "a chunk left out prompt logprobs"
        new = records[known:, : self._form.stride // 4]
        if len(new):
            self.is_finite = self.is_finite and not np.isnan(new[:, 1].view(np.float32)).any()
            self._records += new.tobytes()
            self.next += len(new)

    def take(self) -> Column | None:
        """The column, of which nothing is left here; None if the prompt was not computed to its end."""
        if self.next < self._end:
            return None
        records, self._records = self._records, bytearray()
        return Column(bytes(records), self._form.stride, b"", self._form.form)


class StepColumns:
    """What one step has for one front end, row by row."""

    __slots__ = ("_columns", "_counts", "_rare", "_request_ids", "_tokens")

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._tokens = array("i")
        self._counts: list[int] = []
        # by name and form, with the rows that they are of
        self._columns: dict[tuple[str, RecordForm], tuple[ColumnBuffer, list[int]]] = {}
        self._rare: list[RareFields] = []

    def add(self, request_id: str, tokens: array[int], columns: tuple[ColumnBuffer, ...] = (), first: int = 0) -> None:
        """A row: `tokens` from index `first` on, and their columns, which are moved here."""
        for column in columns:
            entry = self._columns.get(column.kind)
            if entry is None:
                entry = self._columns[column.kind] = (ColumnBuffer(column.name, column.form), [])
            column.move(entry[0])
            entry[1].append(len(self._request_ids))
        self._request_ids.append(request_id)
        count = len(tokens) - first
        if count == 1:
            self._tokens.append(tokens[-1])
        else:
            self._tokens += tokens[first:]
        self._counts.append(count)

    def set_rare(
        self,
        finish: Finish | None,
        cached_tokens: int = 0,
        weight_versions: list[tuple[str, int, int]] | None = None,
        values: dict[str, Any] | None = None,
        prompt_weight_versions: list[tuple[str, int, int]] | None = None,
    ) -> None:
        """What few rows have, of the row just added."""
        row = len(self._request_ids) - 1
        versions, prompt_versions = weight_versions or [], prompt_weight_versions or []
        self._rare.append(RareFields(row, finish, cached_tokens, versions, values or {}, prompt_versions))

    def step(self, stats: StepStats) -> StepOutput:
        """The message that has the columns."""
        count = len(self._request_ids)
        single = self._counts.count(1) == count
        return StepOutput(
            stats,
            self._request_ids,
            self._tokens.tobytes(),
            b"" if single else array("i", self._counts).tobytes(),
            [
                RowColumn(buffer.name, buffer.packed(), b"" if len(rows) == count else array("i", rows).tobytes())
                for buffer, rows in self._columns.values()
            ],
            self._rare,
        )
