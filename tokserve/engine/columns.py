"""Logprobs of one request, gathered row by row from step results until they are sent.

A step's arrays are as wide as its widest row; here a request keeps its own width, as packed bytes that are
joined, never as objects per token.  Knows nothing of requests or steps.
"""

from __future__ import annotations

from tokserve.messages import Logprobs
from tokserve.plan import LogprobRows


class LogprobColumns:
    """The rows not yet sent, in order."""

    __slots__ = ("_mode", "_ranks", "_token_logprobs", "_top_ids", "_top_logprobs", "_width")

    def __init__(self, width: int, mode: str) -> None:
        self._width = width
        self._mode = mode
        self._clear()

    def _clear(self) -> None:
        self._token_logprobs = bytearray()
        self._ranks = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()

    def add(self, rows: LogprobRows, first: int, last: int) -> None:
        """Append rows first..last-1, cut to this request's width."""
        width = self._width
        self._token_logprobs += rows.token_logprobs[first:last].tobytes()
        self._ranks += rows.ranks[first:last].tobytes()
        if width:
            self._top_ids += rows.top_ids[first:last, :width].tobytes()
            self._top_logprobs += rows.top_logprobs[first:last, :width].tobytes()

    def take(self) -> Logprobs:
        """All rows gathered since the last call."""
        taken = Logprobs(
            bytes(self._token_logprobs), bytes(self._ranks), bytes(self._top_ids), bytes(self._top_logprobs),
            self._width, self._mode,
        )  # fmt: skip
        self._clear()
        return taken
