"""The front ends that get output, gauges and changes of state, and the gauges each was sent last.

A front end is known from its first message until it leaves, or until `KEPT` others have written since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from tokserve.engine.output.columns import StepColumns
from tokserve.engine.request import Request
from tokserve.protocol.messages import FromEngine, Status, StepStats

KEPT = 256

Emit = Callable[[bytes, FromEngine], None]


class FrontEnds:
    """`stats`: gauges and counters of the moment."""

    def __init__(self, emit: Emit, clock: Callable[[], float], stats: Callable[[], StepStats]) -> None:
        self._emit = emit
        self._clock = clock
        self._stats = stats
        self._sent: OrderedDict[bytes, tuple[float, StepStats | None]] = OrderedDict()  # last stats: when, what
        self._left: set[bytes] = set()  # their processes have ended

    def __len__(self) -> int:
        return len(self._sent)

    def has_left(self, identity: bytes) -> bool:
        """Whether its process has ended; its last messages may arrive after that."""
        return identity in self._left

    def enter(self, identity: bytes) -> None:
        """It has sent a message; the one that has not for the longest time is forgotten beyond `KEPT`."""
        if identity in self._sent:
            self._sent.move_to_end(identity)
        else:
            self._remember(identity, None)

    def leave(self, identity: bytes) -> None:
        """Forget a front end whose process has ended."""
        self._left.add(identity)
        self._sent.pop(identity, None)

    def send(self, requests: Iterable[Request]) -> None:
        """The new output of these requests, one message per front end."""
        steps: dict[bytes, StepColumns] = {}
        for request in requests:
            columns = steps.get(request.owner)
            if columns is None:
                columns = steps[request.owner] = StepColumns()
            request.emit(columns)
        for identity, columns in steps.items():
            self._send_step(identity, columns, self._stats())

    def send_stats(self, identity: bytes) -> None:
        """Gauges alone, to one front end."""
        self._send_step(identity, StepColumns(), self._stats())

    def refresh_stats(self, before: float) -> None:
        """Gauges alone, to front ends that were sent none since `before` and would see a difference."""
        stale = [identity for identity, (when, _) in self._sent.items() if when <= before]
        if stale:
            stats = self._stats()
            for identity in stale:
                if self._sent[identity][1] != stats:
                    self._send_step(identity, StepColumns(), stats)

    def send_status(self, status: Status) -> None:
        """A change of state, to all."""
        for identity in self._sent:
            self._emit(identity, status)

    def _send_step(self, identity: bytes, columns: StepColumns, stats: StepStats) -> None:
        self._remember(identity, stats)
        self._emit(identity, columns.step(stats))

    def _remember(self, identity: bytes, stats: StepStats | None) -> None:
        self._sent[identity] = (self._clock(), stats)
        if len(self._sent) > KEPT:
            self._sent.popitem(last=False)
