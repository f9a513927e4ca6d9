"""What is asked of the store of sessions, by a route or by a request for tokens: a struct for each call.

In one process a call runs on the `SessionService` itself; with several API processes it is sent to the process that
hosts the service.  `SessionService` adds to the store what needs an event loop: waiting.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, ClassVar

import msgspec

from tokserve.config import Config
from tokserve.features.sessions.canonical import PromptContext
from tokserve.features.sessions.files import SessionFiles
from tokserve.features.sessions.options import SessionOptions
from tokserve.features.sessions.store import SessionStore, summary
from tokserve.features.sessions.turns import Match, Session, Summary, TurnAnswer, TurnPrompt

CONTINUES_SOON = 5.0  # seconds that a request waits for the end of the answer which it continues
MAX_WAIT = 300.0  # seconds of one call that waits for a session
SWEEP = 30.0  # seconds between two searches for sessions that were not used for too long
LISTS = 0.1  # seconds between two looks of a call that waits for any change
START = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds of Unix time by the clock of the start.  A clock that is set later ends no lease and drops no session."""
    return START + time.monotonic()


class SessionCounters(msgspec.Struct):
    """Counts since the start, and what is kept now.  `reasons`: why turns are roots, without numbers and details."""

    sessions: int = 0
    num_bytes: int = 0
    stale: int = 0
    reasons: dict[str, int] = {}
    turns: int = 0
    continued: int = 0
    roots: int = 0
    lost: int = 0


class Signal:
    """Wakes all who wait, each time that it is fired."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake those who wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, deadline: float) -> bool:
        """Wait to be woken; returns False if that was not until `deadline`, by `time.monotonic`."""
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class SessionService:
    """The store, with the calls that wait for a change of it.  Belongs to one event loop."""

    def __init__(self, store: SessionStore, files: SessionFiles | None = None) -> None:
        self.store = store
        self.files = files
        self.counters = SessionCounters()
        self.changes = Signal()
        self.closings = Signal()  # apart: many trainers may wait, and turns end all the time

    async def sweep(self) -> None:
        """Drop sessions that are not used, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP)
            if self.store.expire(steady_time()):
                self.changes.fire()


def reason_kind(reason: str) -> str:
    """Why a turn is a root, without numbers and details: there are few of these."""
    return re.sub(r"\d+", "N", reason.partition(":")[0])


def make_service(config: Config) -> SessionService:
    """A store within the bounds of the options, with the sessions of --session-dir.  Raises StartError."""
    options = config.options_of(SessionOptions)
    files = None if options.session_dir is None else SessionFiles(options.session_dir)
    store = SessionStore(
        max_sessions=options.max_sessions,
        max_bytes=options.max_session_bytes,
        ttl=options.session_ttl,
        max_per_owner=options.max_sessions_per_key,
        observer=files,
    )
    if files is not None:
        files.load(store)
        store.expire(steady_time())
    return SessionService(store, files)


class SessionCall(msgspec.Struct, tag=True):
    """A call; `run` returns its result, of the type `result`."""

    result: ClassVar[Any]

    def longest_wait(self) -> float:
        """Seconds that it may wait for a change."""
        return 0.0

    async def run(self, service: SessionService) -> Any:
        raise NotImplementedError


class SessionNotice(msgspec.Struct, tag=True):
    """A call without a result, which does not wait."""

    def apply(self, service: SessionService) -> None:
        raise NotImplementedError


class FindTurn(SessionCall):
    """The turn that a conversation continues; see `SessionStore.match`.  `expects_answer`: the digests of those of its
    prefixes that an answer follows: if one of them is being answered, its end is waited for."""

    result: ClassVar[Any] = Match

    owner: str
    session_id: str
    context: PromptContext
    digests: list[bytes]
    expects_answer: list[bytes] = []

    def longest_wait(self) -> float:
        return CONTINUES_SOON

    async def run(self, service: SessionService) -> Match:
        deadline, store = time.monotonic() + self.longest_wait(), service.store
        while True:
            match = store.match(self.owner, self.session_id, self.context, self.digests, steady_time())
            deeper = set(self.digests[max(match.num_messages - 1, 0) :]).intersection(self.expects_answer)
            if not store.is_running(self.owner, self.session_id, deeper) or not await service.changes.wait(deadline):
                return match


class BeginRequest(SessionNotice):
    """A request is being answered; `number`: of its session; `digest`: of the chain of its messages."""

    owner: str
    session_id: str
    number: int
    request_id: str
    digest: bytes

    def apply(self, service: SessionService) -> None:
        service.store.begin(self.owner, self.session_id, self.number, self.request_id, self.digest, steady_time())


class AddTurn(SessionNotice):
    """An answer has ended; `number`: of its session."""

    owner: str
    session_id: str
    number: int
    prompt: TurnPrompt
    answer: TurnAnswer

    def apply(self, service: SessionService) -> None:
        added = service.store.add(self.owner, self.session_id, self.number, self.prompt, self.answer, steady_time())
        counters = service.counters
        if added is None:
            counters.lost += 1
            return
        counters.turns += 1
        if self.prompt.parent is None:
            counters.roots += 1
            reason = reason_kind(self.prompt.because or "")
            counters.reasons[reason] = counters.reasons.get(reason, 0) + 1
        else:
            counters.continued += 1
        service.changes.fire()


class EndRequest(SessionNotice):
    """All answers to a request have ended."""

    owner: str
    session_id: str
    request_id: str

    def apply(self, service: SessionService) -> None:
        service.store.end(self.owner, self.session_id, self.request_id, steady_time())
        service.changes.fire()


class CreateSession(SessionCall):
    """Makes a session; the result is its id."""

    result: ClassVar[Any] = str

    owner: str
    session_id: str | None
    metadata: dict[str, Any]

    async def run(self, service: SessionService) -> str:
        return service.store.create(self.owner, self.session_id, self.metadata, steady_time())


class ListSessions(SessionCall):
    """Sessions in a state (None: in any), once there is one, or after `wait` seconds."""

    result: ClassVar[Any] = list[Summary]

    owner: str
    state: str | None
    limit: int
    after: str | None
    wait: float
    newest_first: bool = False

    def longest_wait(self) -> float:
        return min(self.wait, MAX_WAIT)

    async def run(self, service: SessionService) -> list[Summary]:
        deadline, store = time.monotonic() + self.longest_wait(), service.store
        while True:
            seen = store.num_changes
            listed = store.sessions(self.owner, self.state, self.limit, self.after, newest_first=self.newest_first)
            if listed:
                return listed
            while not store.has_changed(self.owner, self.state, seen):
                if not await service.changes.wait(deadline):
                    return []
                await asyncio.sleep(LISTS)


class ReadSession(SessionCall):
    """A session with its turns."""

    result: ClassVar[Any] = Session

    owner: str
    session_id: str

    async def run(self, service: SessionService) -> Session:
        return service.store.get(self.owner, self.session_id)


class SummarizeSession(SessionCall):
    """A session without its turns."""

    result: ClassVar[Any] = Summary

    owner: str
    session_id: str

    async def run(self, service: SessionService) -> Summary:
        return summary(service.store.get(self.owner, self.session_id))


class CloseSession(SessionCall):
    """No request of the session is expected any more."""

    result: ClassVar[Any] = Summary

    owner: str
    session_id: str

    async def run(self, service: SessionService) -> Summary:
        closed = service.store.close(self.owner, self.session_id, steady_time())
        service.closings.fire()
        service.changes.fire()
        return closed


class DeleteSession(SessionCall):
    """Drops a session."""

    result: ClassVar[Any] = None

    owner: str
    session_id: str

    async def run(self, service: SessionService) -> None:
        service.store.delete(self.owner, self.session_id)
        service.changes.fire()


class AddMetadata(SessionCall):
    """Adds names to the metadata of a session, or of one of its turns."""

    result: ClassVar[Any] = Summary

    owner: str
    session_id: str
    metadata: dict[str, Any]
    turn_id: str | None

    async def run(self, service: SessionService) -> Summary:
        changed = service.store.add_metadata(self.owner, self.session_id, self.metadata, self.turn_id, steady_time())
        service.changes.fire()
        return changed


class NextSession(SessionCall):
    """A closed session that no trainer has, once there is one; None after `wait` seconds.  It is the caller's for
    `lease` seconds."""

    result: ClassVar[Any] = Session | None

    owner: str
    wait: float
    lease: float

    def longest_wait(self) -> float:
        return min(self.wait, MAX_WAIT)

    async def run(self, service: SessionService) -> Session | None:
        deadline = time.monotonic() + self.longest_wait()
        while True:
            now = steady_time()
            session = service.store.take(self.owner, self.lease, now)
            if session is not None:
                return session
            lease_end = service.store.next_lease_end(self.owner, now)
            until = deadline if lease_end is None else min(deadline, time.monotonic() + lease_end - now)
            if not await service.closings.wait(until) and time.monotonic() >= deadline:
                return None


class CountSessions(SessionCall):
    """The counters of the store."""

    result: ClassVar[Any] = SessionCounters

    async def run(self, service: SessionService) -> SessionCounters:
        store, files = service.store, service.files
        stale = 0 if files is None else files.num_stale
        return msgspec.structs.replace(service.counters, sessions=len(store), num_bytes=store.num_bytes, stale=stale)


AnyCall = (
    FindTurn
    | CreateSession
    | ListSessions
    | ReadSession
    | SummarizeSession
    | CloseSession
    | DeleteSession
    | AddMetadata
    | NextSession
    | CountSessions
)
AnyNotice = BeginRequest | AddTurn | EndRequest
