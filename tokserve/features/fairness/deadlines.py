"""When requests must have ended, or must have left the queue: the earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tokserve.engine.request import Request

SPARE = 64  # entries of ended requests that are not worth removing


class Deadlines:
    """A heap of (when, number, which, request); entries of requests that ended in time are dropped later."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """The deadlines in the request's options, counted from when it was received."""
        options = request.options
        for which, limit in (("deadline", options.deadline_ms), ("queue_timeout", options.queue_timeout_ms)):
            if limit is not None:
                heapq.heappush(self._heap, (request.history.received + limit / 1e3, request.number, which, request))

    def passed(self, now: float) -> Iterator[tuple[Request, str]]:
        """Requests that are late, and for which of the two limits; end each before the next is taken."""
        while self._heap and self._heap[0][0] <= now:
            _, _, which, request = heapq.heappop(self._heap)
            if _counts(which, request):
                yield request, which

    def tidy(self, num_live: int) -> None:
        """Forget those of ended requests, once most are."""
        if len(self._heap) > 2 * num_live + SPARE:
            self._heap = [entry for entry in self._heap if _counts(entry[2], entry[3])]
            heapq.heapify(self._heap)

    def seconds_to_next(self, now: float) -> float | None:
        """Until the earliest that still counts; None: there is none."""
        while self._heap and not _counts(self._heap[0][2], self._heap[0][3]):
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - now) if self._heap else None


def _counts(which: str, request: Request) -> bool:
    return request.finish is None and (which == "deadline" or request.history.admitted is None)
