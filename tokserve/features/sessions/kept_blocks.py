"""The blocks of open sessions in the KV cache: what their next turns begin with, kept before the blocks of others.

They are of no table, so a request that needs a block still gets it: only the order in which cached blocks are taken
changes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from tokserve.engine.admin.command import command
from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.request import Request
from tokserve.features.sessions.options import SessionOptions
from tokserve.protocol.messages import EngineRequest


def make(context: EngineContext) -> EngineFeature | None:
    """None without --sessions."""
    options = context.config.options_of(SessionOptions)
    limit = int(options.session_cache_share * context.cache.pool.total)
    return KeptBlocks(context.cache, limit) if options.sessions else None


class KeptBlocks(EngineFeature):
    """Keeps the full blocks of each session's last request, at most `limit` of all sessions together: those of the
    sessions that were used last."""

    def __init__(self, cache: PrefixCache, limit: int) -> None:
        self._cache, self._limit = cache, limit
        self._generation = cache.generation
        self._sessions: dict[Request, str] = {}  # of requests that have not ended
        self._kept: OrderedDict[str, list[bytes]] = OrderedDict()  # hashes by session, the one used last at the end
        self._holders: Counter[bytes] = Counter()  # sessions that have a block
        self._hits = 0

    def attach(self, request: Request, spec: EngineRequest) -> None:
        if spec.options.session:
            self._sessions[request] = spec.options.session

    def on_end(self, request: Request) -> None:
        session = self._sessions.pop(request, None)
        if session is None:
            return
        self._hits += request.history.cached_tokens or 0
        table = request.table
        if table.num_full and self._cache.is_current(table):
            self._keep(session, table.hashes[: min(table.num_full, self._limit)])

    def clear(self) -> None:
        for session in list(self._kept):
            self.release_session(session)

    def stats(self) -> dict[str, Any]:
        self._forget_replaced()
        return {"session_blocks": len(self._holders), "session_hits": self._hits}

    @command("release_session")
    def release_session(self, session: str) -> None:
        """The session has no more turns: its blocks are like those of others."""
        for block_hash in self._kept.pop(session, ()):
            self._holders[block_hash] -= 1
            if not self._holders[block_hash]:
                del self._holders[block_hash]
                self._cache.pool.keep_no_longer(block_hash)

    def _keep(self, session: str, hashes: list[bytes]) -> None:
        self._forget_replaced()
        self._holders.update(hashes)
        for block_hash in hashes:
            self._cache.pool.keep(block_hash)
        self.release_session(session)
        self._kept[session] = hashes
        while len(self._holders) > self._limit:
            self.release_session(next(iter(self._kept)))

    def _forget_replaced(self) -> None:
        """Forget all sessions if the cache was reset: what was computed before is not found any more."""
        if self._generation != self._cache.generation:
            self._generation = self._cache.generation
            self._kept.clear()
            self._holders.clear()
