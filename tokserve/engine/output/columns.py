"""Output on its way to the front end, in columns: logprobs and sampling masks of one request, and a step's message.

A step's arrays are as wide as its widest row; a request keeps its own width, as packed bytes that are
joined, never as objects per token.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokserve.protocol.messages import (
    MASK_ROW,
    Finish,
    Logprobs,
    RareFields,
    RoutedExperts,
    RowLogprobs,
    RowSamplingMasks,
    SamplingMasks,
    StepOutput,
    StepStats,
)
from tokserve.protocol.plan import LogprobRows, SamplingMaskRows


class PackedRows:
    """The logprobs of a step's sampled tokens as bytes, so that taking a row out of them is a slice."""

    __slots__ = ("ranks", "stride", "token_logprobs", "top_ids", "top_logprobs")

    def __init__(self, rows: LogprobRows) -> None:
        self.token_logprobs = rows.token_logprobs.tobytes()
        self.ranks = rows.ranks.tobytes()
        self.top_ids = rows.top_ids.tobytes()
        self.top_logprobs = rows.top_logprobs.tobytes()
        self.stride = 4 * rows.top_ids.shape[1]  # bytes


class LogprobColumns:
    """Rows of one width and mode that are not yet sent, in order.  The newest step's rows are copied when the next
    step's come, or straight to where they are moved: those of a stream are thus copied once."""

    __slots__ = ("_newest", "_ranks", "_token_logprobs", "_top_ids", "_top_logprobs", "kind", "mode", "width")

    def __init__(self, width: int, mode: str) -> None:
        self.width = width
        self.mode = mode
        self.kind = (width, mode)
        self._newest: tuple[PackedRows, int, int] | None = None  # rows, first, count
        self._token_logprobs = bytearray()
        self._ranks = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()

    def append(self, rows: PackedRows, first: int, count: int = 1) -> None:
        if self._newest is not None:
            self._copy_newest()
        self._newest = (rows, first, count)

    def _copy_newest(self) -> None:
        if self._newest is not None:
            self._copy(*self._newest)
            self._newest = None

    def _copy(self, rows: PackedRows, first: int, count: int) -> None:
        start, end = 4 * first, 4 * (first + count)
        self._token_logprobs += rows.token_logprobs[start:end]
        self._ranks += rows.ranks[start:end]
        if self.width:
            stride = rows.stride
            for start in range(stride * first, stride * (first + count), stride):
                end = start + 4 * self.width
                self._top_ids += rows.top_ids[start:end]
                self._top_logprobs += rows.top_logprobs[start:end]

    def add(self, rows: LogprobRows, first: int, last: int) -> None:
        """Append rows first..last-1, cut to this width."""
        self._copy_newest()
        width = self.width
        self._token_logprobs += rows.token_logprobs[first:last].tobytes()
        self._ranks += rows.ranks[first:last].tobytes()
        if width:
            self._top_ids += rows.top_ids[first:last, :width].tobytes()
            self._top_logprobs += rows.top_logprobs[first:last, :width].tobytes()

    def move(self, to: LogprobColumns) -> None:
        """Append all rows to those of another of the same width and mode; none are left here."""
        if to._newest is not None:
            to._copy_newest()
        if self._ranks:
            to._token_logprobs += self._token_logprobs
            to._ranks += self._ranks
            to._top_ids += self._top_ids
            to._top_logprobs += self._top_logprobs
            for column in (self._token_logprobs, self._ranks, self._top_ids, self._top_logprobs):
                column.clear()
        if self._newest is not None:
            to._copy(*self._newest)
            self._newest = None

    def packed(self) -> Logprobs:
        self._copy_newest()
        return Logprobs(
            bytes(self._token_logprobs),
            bytes(self._ranks),
            bytes(self._top_ids),
            bytes(self._top_logprobs),
            self.width,
            self.mode,
        )


class RoutedColumns:
    """The experts chosen for a request's positions, from the first one on."""

    __slots__ = ("_ids", "_item", "_shape")

    def __init__(self) -> None:
        self._ids = bytearray()
        self._shape, self._item = (0, 0), 1

    def add(self, end: int, ids: NDArray[Any]) -> None:
        """Put in the experts of the last positions before `end`, [n, layers, chosen], in place of what is known from
        there on: after a preemption, or where drafts were rejected."""
        self._shape, self._item = (ids.shape[1], ids.shape[2]), ids.itemsize
        start = (end - len(ids)) * ids[0].nbytes
        assert start <= len(self._ids), "a step left out routed experts"
        del self._ids[start:]
        self._ids += ids.tobytes()

    def packed(self, start: int, end: int) -> RoutedExperts:
        """The experts of positions `start` to `end` - 1, as far as they are computed."""
        layers, chosen = self._shape
        size = layers * chosen * self._item
        return RoutedExperts(bytes(self._ids[start * size : end * size]), start, layers, chosen, self._item)


class PackedMasks:
    """The sampling masks of a step's tokens as bytes."""

    __slots__ = ("ends", "ids", "rows")

    def __init__(self, rows: SamplingMaskRows) -> None:
        packed = np.empty((len(rows.counts), 3), np.int32)
        packed[:, 0] = rows.counts
        packed[:, 1], packed[:, 2] = rows.logprobs.view(np.int32), rows.kept_logprobs.view(np.int32)
        self.rows = packed.tobytes()
        self.ids = rows.ids.tobytes()
        self.ends = [0, *(4 * np.maximum(rows.counts, 0)).cumsum().tolist()]  # in `ids`, of the rows before each


class MaskColumns:
    """Sampling masks that are not yet sent, in order."""

    __slots__ = ("_ids", "_rows")

    def __init__(self) -> None:
        self._rows = bytearray()
        self._ids = bytearray()

    def append(self, rows: PackedMasks, first: int, count: int) -> None:
        self._rows += rows.rows[MASK_ROW * first : MASK_ROW * (first + count)]
        self._ids += rows.ids[rows.ends[first] : rows.ends[first + count]]

    def move(self, to: MaskColumns) -> None:
        """Append all rows to those of another; none are left here."""
        to._rows += self._rows
        to._ids += self._ids
        self._rows.clear()
        self._ids.clear()

    def packed(self) -> SamplingMasks:
        return SamplingMasks(bytes(self._rows), bytes(self._ids))


class StepColumns:
    """What one step has for one front end, row by row."""

    __slots__ = ("_counts", "_logprobs", "_mask_rows", "_masks", "_rare", "_request_ids", "_tokens")

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._tokens = array("i")
        self._counts: list[int] = []
        self._logprobs: dict[tuple[int, str], tuple[LogprobColumns, list[int]]] = {}  # with the rows they are of
        self._rare: list[RareFields] = []
        self._masks = MaskColumns()
        self._mask_rows: list[int] = []  # that have masks

    def add(
        self,
        request_id: str,
        tokens: array[int],
        logprobs: LogprobColumns | None = None,
        first: int = 0,
        masks: MaskColumns | None = None,
    ) -> None:
        """A row: `tokens` from index `first` on, and their logprobs and sampling masks, which are moved here."""
        if logprobs is not None:
            entry = self._logprobs.get(logprobs.kind)
            if entry is None:
                entry = self._logprobs[logprobs.kind] = (LogprobColumns(*logprobs.kind), [])
            columns, rows = entry
            logprobs.move(columns)
            rows.append(len(self._request_ids))
        if masks is not None:
            masks.move(self._masks)
            self._mask_rows.append(len(self._request_ids))
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
        prompt_logprobs: LogprobColumns | None = None,
        cached_tokens: int = 0,
        weight_versions: list[tuple[str, int, int]] | None = None,
        pooled: bytes = b"",
        routed_experts: RoutedExperts | None = None,
        kv_transfer: dict[str, Any] | None = None,
        prompt_weight_versions: list[tuple[str, int, int]] | None = None,
    ) -> None:
        """What few rows have, of the row just added."""
        packed = None if prompt_logprobs is None else prompt_logprobs.packed()
        row = len(self._request_ids) - 1
        self._rare.append(
            RareFields(
                row,
                finish,
                packed,
                cached_tokens,
                weight_versions or [],
                pooled,
                routed_experts,
                kv_transfer,
                prompt_weight_versions or [],
            )
        )

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
                RowLogprobs(columns.packed(), b"" if len(rows) == count else array("i", rows).tobytes())
                for columns, rows in self._logprobs.values()
            ],
            self._rare,
            self._sampling_masks(),
        )

    def _sampling_masks(self) -> RowSamplingMasks | None:
        rows = self._mask_rows
        if not rows:
            return None
        packed = b"" if len(rows) == len(self._request_ids) else array("i", rows).tobytes()
        return RowSamplingMasks(self._masks.packed(), packed)
