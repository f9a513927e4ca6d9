"""The engine of a session, among several: the same for all of its requests, as that engine has their prefix cached.

It is computed from the session's id by rendezvous hashing, so that API processes agree without a table, and that only
the sessions of an engine that is lost move to others, until it is replaced.
"""

from __future__ import annotations

import hashlib

from tokserve.client.async_llm import AsyncLLM

SESSION_HEADER = "X-Session-ID"


def session_rank(llm: AsyncLLM, session_id: str) -> int | None:
    """The rank of the session's engine; None if there is one engine, or none that is up."""
    if llm.num_engines == 1:
        return None
    up = [report.rank for report in llm.reports if not report.down and report.status.quarantine is None]
    return max(up, key=lambda rank: _weight(session_id, rank), default=None)


def _weight(session_id: str, rank: int) -> bytes:
    return hashlib.blake2b(b"%d %b" % (rank, session_id.encode()), digest_size=8).digest()
