"""The closed sessions of one owner: those that no trainer has, and the leases of those that one has."""

from __future__ import annotations

import heapq

from tokserve.features.sessions.turns import Session

SLACK = 64  # ends of leases that may be kept for nothing


class ClosedSessions:
    """Gives out closed sessions, those first that were closed or whose lease ended first.  Times are seconds of Unix
    time; `Session.lease_end` is kept here."""

    def __init__(self) -> None:
        self._free: dict[str, Session] = {}
        self._taken: dict[str, Session] = {}
        self._ends: list[tuple[float, str]] = []  # a heap, with ends that count no more

    def __len__(self) -> int:
        return len(self._free) + len(self._taken)

    def add(self, session: Session) -> None:
        """The session was closed."""
        self._free[session.session_id] = session

    def discard(self, session_id: str) -> None:
        """The session does not exist any more."""
        self._free.pop(session_id, None)
        self._taken.pop(session_id, None)

    def take(self, lease: float, now: float) -> Session | None:
        """A session, which is the caller's for `lease` seconds; None: there is none."""
        self._end_leases(now)
        if not self._free:
            return None
        session = self._free.pop(next(iter(self._free)))
        session.lease_end = now + lease
        self._taken[session.session_id] = session
        heapq.heappush(self._ends, (session.lease_end, session.session_id))
        if len(self._ends) > 2 * len(self._taken) + SLACK:  # most are of sessions that were deleted
            self._ends = [(one.lease_end, one.session_id) for one in self._taken.values()]
            heapq.heapify(self._ends)
        return session

    def next_lease_end(self, now: float) -> float | None:
        """When the next lease ends; None: there is none."""
        self._end_leases(now)
        return self._ends[0][0] if self._ends else None

    def _end_leases(self, now: float) -> None:
        while self._ends:
            end, session_id = self._ends[0]
            session = self._taken.get(session_id)
            if session is not None and session.lease_end == end:
                if end > now:
                    return
                self._free[session_id] = self._taken.pop(session_id)
            heapq.heappop(self._ends)
