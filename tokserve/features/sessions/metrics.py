"""The metrics of sessions."""

from __future__ import annotations

from tokserve.base.errors import Unavailable
from tokserve.features.sessions.access import sessions_of
from tokserve.features.sessions.calls import CountSessions, SessionCounters
from tokserve.features.sessions.options import SessionOptions
from tokserve.server.observer import Measure, ServerObserver
from tokserve.server.serving import Serving


class SessionMeasures(ServerObserver):
    """Exports the counters of the store, whichever process has it."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._has_sessions = serving.config.options_of(SessionOptions).sessions

    async def measures(self) -> list[Measure]:
        if not self._has_sessions:
            return []
        try:
            counters: SessionCounters = await sessions_of(self._serving).call(CountSessions())
        except Unavailable:
            return []
        turns = {"continued": counters.continued, "root": counters.roots, "lost": counters.lost}
        return [
            Measure("sessions", "Sessions that exist.", {"": counters.sessions}),
            Measure("session_bytes", "Memory of all sessions.", {"": counters.num_bytes}),
            Measure("session_files_stale", "Sessions whose last change could not be written.", {"": counters.stale}),
            Measure("session_turns", "Turns that ended, by what became of them.", turns, "kind", is_counter=True),
            Measure(
                "session_roots", "Turns that continue none, by reason.", counters.reasons, "reason", is_counter=True
            ),
        ]
