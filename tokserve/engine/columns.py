"""Output on its way to the front end, in columns: the logprobs of one request, and a step's message.

A step's arrays are as wide as its widest row; a request keeps its own width, as packed bytes that are
joined, never as objects per token.
"""

from __future__ import annotations

from array import array
from typing import Any

from numpy.typing import NDArray

from tokserve.messages import Finish, Logprobs, RareFields, RoutedExperts, RowLogprobs, StepOutput, StepStats
from tokserve.plan import LogprobRows


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
    """Rows of one width and mode that are not yet sent, in order."""

    __slots__ = ("_ranks", "_token_logprobs", "_top_ids", "_top_logprobs", "mode", "width")

    def __init__(self, width: int, mode: str) -> None:
        self.width = width
        self.mode = mode
        self._token_logprobs = bytearray()
        self._ranks = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()

    def append(self, rows: PackedRows, first: int, count: int = 1) -> None:
        """Append `count` rows from `first` on, cut to this width."""
        start, end = 4 * first, 4 * (first + count)
        self._token_logprobs += rows.token_logprobs[start:end]
        self._ranks += rows.ranks[start:end]
        if self.width:
            for start in range(rows.stride * first, rows.stride * (first + count), rows.stride):
                end = start + 4 * self.width
                self._top_ids += rows.top_ids[start:end]
                self._top_logprobs += rows.top_logprobs[start:end]

    def add(self, rows: LogprobRows, first: int, last: int) -> None:
        """Append rows first..last-1, cut to this width."""
        width = self.width
        self._token_logprobs += rows.token_logprobs[first:last].tobytes()
        self._ranks += rows.ranks[first:last].tobytes()
        if width:
            self._top_ids += rows.top_ids[first:last, :width].tobytes()
            self._top_logprobs += rows.top_logprobs[first:last, :width].tobytes()

    def move(self, to: LogprobColumns) -> None:
        """Append all rows to those of another of the same width and mode; none are left here."""
        to._token_logprobs += self._token_logprobs
        to._ranks += self._ranks
        self._token_logprobs.clear()
        self._ranks.clear()
        if self.width:
            to._top_ids += self._top_ids
            to._top_logprobs += self._top_logprobs
            self._top_ids.clear()
            self._top_logprobs.clear()

    def packed(self) -> Logprobs:
        """The rows as a message's part."""
        return Logprobs(
            bytes(self._token_logprobs), bytes(self._ranks), bytes(self._top_ids), bytes(self._top_logprobs),
            self.width, self.mode,
        )  # fmt: skip


class RoutedColumns:
    """The experts chosen for a request's positions, from the first one on."""

    __slots__ = ("_ids", "_item", "_shape")

    def __init__(self) -> None:
        self._ids = bytearray()
        self._shape, self._item = (0, 0), 1

    def add(self, end: int, ids: NDArray[Any]) -> None:
        """Those of the last positions before `end`, [n, layers, chosen], in place of what is known from there on: after
        a preemption, or where drafts were rejected."""
        self._shape, self._item = (ids.shape[1], ids.shape[2]), ids.itemsize
        start = (end - len(ids)) * ids[0].nbytes
        assert start <= len(self._ids), "a step left out routed experts"
        del self._ids[start:]
        self._ids += ids.tobytes()

    def packed(self, start: int, end: int) -> RoutedExperts:
        """Those of positions start ... end - 1, as far as they are computed."""
        layers, chosen = self._shape
        size = layers * chosen * self._item
        return RoutedExperts(bytes(self._ids[start * size : end * size]), start, layers, chosen, self._item)


class StepColumns:
    """What one step has for one front end, row by row."""

    __slots__ = ("_counts", "_logprobs", "_rare", "_request_ids", "_tokens")

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._tokens = array("i")
        self._counts: list[int] = []
        self._logprobs: dict[tuple[int, str], tuple[LogprobColumns, list[int]]] = {}  # with the rows they are of
        self._rare: list[RareFields] = []

    def add(self, request_id: str, tokens: array[int], logprobs: LogprobColumns | None = None) -> None:
        """A row: new tokens, and their logprobs, which are moved here."""
        if logprobs is not None:
            kind = (logprobs.width, logprobs.mode)
            if kind not in self._logprobs:
                self._logprobs[kind] = (LogprobColumns(*kind), [])
            columns, rows = self._logprobs[kind]
            logprobs.move(columns)
            rows.append(len(self._request_ids))
        self._request_ids.append(request_id)
        self._tokens += tokens
        self._counts.append(len(tokens))

    def set_rare(
        self, finish: Finish | None, prompt_logprobs: LogprobColumns | None = None, cached_tokens: int = 0,
        weight_versions: list[tuple[str, int, int]] | None = None, pooled: bytes = b"",
        routed_experts: RoutedExperts | None = None,
    ) -> None:  # fmt: skip
        """What few rows have, of the row just added."""
        packed = None if prompt_logprobs is None else prompt_logprobs.packed()
        row = len(self._request_ids) - 1
        self._rare.append(RareFields(row, finish, packed, cached_tokens, weight_versions or [], pooled, routed_experts))

    def step(self, stats: StepStats) -> StepOutput:
        """The message."""
        count = len(self._request_ids)
        single = self._counts.count(1) == count
        return StepOutput(
            stats, self._request_ids, self._tokens.tobytes(), b"" if single else array("i", self._counts).tobytes(),
            [
                RowLogprobs(columns.packed(), b"" if len(rows) == count else array("i", rows).tobytes())
                for columns, rows in self._logprobs.values()
            ],
            self._rare,
        )  # fmt: skip
