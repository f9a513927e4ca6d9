"""The store of sessions: pure bookkeeping within bounds, without sockets, clocks of its own or models.

A session belongs to its owner: the same id of another owner is another session.  Every turn of a session is found by
the digest of its messages and its answer, so the turn that a request continues is found without comparing texts.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from tokserve.base.errors import Conflict, NotFound, QueueFull, RequestError
from tokserve.client.outputs import TERMINATORS
from tokserve.features.sessions.canonical import PromptContext, chain
from tokserve.features.sessions.leases import ClosedSessions
from tokserve.features.sessions.turns import Match, Session, StoredTurn, Summary, TurnAnswer, TurnPrompt

MAX_METADATA = 1 << 20  # bytes of a session's metadata, as JSON
LITTLE_METADATA = 1 << 12  # bytes that are taken when the memory of sessions is used up, too
FIRST = "it is the first turn of the session"
SESSION_BYTES = 4096  # of a session without turns
MAX_ID = 256  # characters
RESERVED = ("next", ".", "..")  # the path /sessions/next is a route, and clients resolve dots before they send


class StoreObserver:
    """Is told of the changes of a store, after each.  Each method does nothing unless a subclass needs it."""

    def on_created(self, session: Session) -> None:
        """There is a new session, without metadata."""

    def on_turn(self, session: Session, turn: StoredTurn) -> None:
        """A turn was added."""

    def on_metadata(self, session: Session, turn: StoredTurn | None) -> None:
        """The metadata of a turn changed; None: that of the session."""

    def on_closed(self, session: Session) -> None:
        """The session is closed."""

    def on_dropped(self, session: Session) -> None:
        """The session does not exist any more."""


class RestoredTurn(Protocol):
    """A turn of an earlier server."""

    turn_id: str
    created: float
    prompt: TurnPrompt
    answer: TurnAnswer
    metadata: dict[str, Any]


def unknown(session_id: str) -> NotFound:
    return NotFound(f"there is no session {session_id[:MAX_ID]!r}", field="session_id", code="session_not_found")


def check_id(session_id: str) -> None:
    """Raise RequestError for an id that no path can have."""
    plain = session_id.isascii() and session_id.isprintable() and "/" not in session_id
    if not plain or not 0 < len(session_id) <= MAX_ID or session_id in RESERVED:
        raise RequestError(
            f"session_id must be 1 to {MAX_ID} printable ASCII characters without '/', and none of "
            + ", ".join(map(repr, RESERVED)),
            field="session_id",
        )


class SessionStore:
    """All sessions of a server.  `max_sessions`, `max_bytes`: together; `max_per_owner`: of one.  `ttl`: seconds of no
    use after which a session is dropped.  Times are seconds of Unix time."""

    def __init__(
        self,
        *,
        max_sessions: int,
        max_bytes: int,
        ttl: float,
        max_per_owner: int | None = None,
        observer: StoreObserver | None = None,
    ) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._max_per_owner = max_per_owner
        self._num_of_owner: Counter[str] = Counter()
        self._observer = observer or StoreObserver()
        self._sessions: dict[tuple[str, str], Session] = {}  # those that were used last come last
        self._closed: dict[str, ClosedSessions] = {}  # by owner
        self._numbers = itertools.count(1)
        self.num_changes = 0  # of sessions that exist
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_full(self) -> bool:
        """Whether a bound is reached."""
        return len(self._sessions) >= self._max_sessions or self.num_bytes >= self._max_bytes

    def create(self, owner: str, session_id: str | None, metadata: dict[str, Any], now: float) -> str:
        """Make an empty session; None: with an id of the store's.  Raises Conflict if there is one, and
        QueueFull at a bound."""
        session_id = session_id or secrets.token_hex(16)
        if (owner, session_id) in self._sessions:
            raise Conflict(
                f"there is a session {session_id[:MAX_ID]!r} already", field="session_id", code="session_exists"
            )
        self._check_metadata(_size(metadata), now)
        session = self._make(owner, session_id, now)
        if metadata:
            self._set_metadata(session, metadata)
            self._observer.on_metadata(session, None)
        return session_id

    def match(self, owner: str, session_id: str, context: PromptContext, digests: Sequence[bytes], now: float) -> Match:
        """The turn that a conversation continues: the deepest whose messages and answer it begins with, in the same
        context.  The session is made if there is none.  Raises QueueFull at a bound.

        `digests`: the chain of the messages that may belong to earlier turns.
        """
        session = self._sessions.get((owner, session_id)) or self._make(owner, session_id, now)
        self._touch(session, now)
        self._check_bytes(now)
        other: StoredTurn | None = None
        for count in range(len(digests), 0, -1):
            for turn_id in reversed(session.by_key.get(digests[count - 1], ())):
                turn = session.turns[turn_id]
                if turn.prompt.context == context:
                    return _matched(session, turn)
                other = other or turn
        return Match(number=session.number, because=_reason(session, context, other, digests))

    def begin(self, owner: str, session_id: str, number: int, request_id: str, digest: bytes, now: float) -> None:
        """A request is being answered of the session that has this number; `digest`: of the chain of its messages."""
        session = self._sessions.get((owner, session_id))
        if session is not None and session.number == number:
            session.running[request_id] = digest
            self._touch(session, now)

    def end(self, owner: str, session_id: str, request_id: str, now: float) -> None:
        """The request is answered, or was given up."""
        session = self._sessions.get((owner, session_id))
        if session is not None:
            session.running.pop(request_id, None)
            self._touch(session, now)

    def is_running(self, owner: str, session_id: str, digests: Iterable[bytes]) -> bool:
        """Whether a request is being answered whose messages have one of these digests."""
        session = self._sessions.get((owner, session_id))
        return session is not None and not set(digests).isdisjoint(session.running.values())

    def add(
        self, owner: str, session_id: str, number: int, prompt: TurnPrompt, answer: TurnAnswer, now: float
    ) -> str | None:
        """Add a turn; returns its id, or None if the session with this number was deleted meanwhile."""
        session = self._sessions.get((owner, session_id))
        if session is None or session.number != number:
            return None
        turn = self._insert(session, f"t{session.num_turns}", prompt, answer, now)
        self._touch(session, now)
        self._observer.on_turn(session, turn)
        return turn.turn_id

    def _insert(
        self, session: Session, turn_id: str, prompt: TurnPrompt, answer: TurnAnswer, created: float
    ) -> StoredTurn:
        parent = None if prompt.parent is None else session.turns[prompt.parent]
        count = (0 if parent is None else parent.num_messages) + len(prompt.chain)
        start = prompt.chain[-1] if prompt.chain else b"" if parent is None else parent.key
        turn = StoredTurn(
            turn_id=turn_id,
            prompt=prompt,
            answer=answer,
            key=chain([answer.message], start)[0],
            num_messages=count + 1,
            num_ids=(0 if parent is None else parent.num_ids) + (len(prompt.new_ids) + len(answer.token_ids)) // 4,
            depth=0 if parent is None else parent.depth + 1,
            created=created,
        )
        session.num_turns += 1
        session.num_roots += prompt.parent is None
        session.num_tokens += len(answer.token_ids) // 4
        session.turns[turn.turn_id] = turn
        session.by_key.setdefault(turn.key, []).append(turn.turn_id)
        first = count - len(prompt.chain)
        session.prefixes.update({digest: first + index + 1 for index, digest in enumerate(prompt.chain)})
        session.prefixes[turn.key] = turn.num_messages
        self._grow(session, turn.size)
        return turn

    def get(self, owner: str, session_id: str) -> Session:
        """Raises NotFound."""
        session = self._sessions.get((owner, session_id))
        if session is None:
            raise unknown(session_id)
        return session

    def sessions(
        self, owner: str, state: str | None, limit: int, after: str | None = None, *, newest_first: bool = False
    ) -> list[Summary]:
        """The owner's sessions in one state, or in any, those that were used last at the end, or first; `after`: those
        after the session with this id.  Raises NotFound for one that does not exist."""
        if after is not None and (owner, after) not in self._sessions:
            raise NotFound(f"there is no session {after[:MAX_ID]!r}", field="after", code="session_not_found")
        listed: list[Summary] = []
        passed = after is None
        for session in reversed(self._sessions.values()) if newest_first else self._sessions.values():
            if session.owner != owner:
                continue
            if not passed:
                passed = session.session_id == after
                continue
            if state is None or session.state == state:
                listed.append(summary(session))
                if len(listed) == limit:
                    break
        return listed

    def has_changed(self, owner: str, state: str | None, since: int) -> bool:
        """Whether a session of the owner is in the state (None: in any) that has changed since `num_changes` had this
        value."""
        for session in reversed(self._sessions.values()):
            if session.change <= since:
                return False
            if session.owner == owner and state in (None, session.state):
                return True
        return False

    def close(self, owner: str, session_id: str, now: float) -> Summary:
        """No request is expected any more: trainers may take it.  Raises NotFound."""
        session = self.get(owner, session_id)
        if not session.closed:
            session.closed = True
            self._closed.setdefault(owner, ClosedSessions()).add(session)
            self._touch(session, now)
            self._observer.on_closed(session)
        return summary(session)

    def delete(self, owner: str, session_id: str) -> None:
        """Raises NotFound."""
        self._drop(self.get(owner, session_id))

    def add_metadata(
        self, owner: str, session_id: str, metadata: dict[str, Any], turn_id: str | None, now: float
    ) -> Summary:
        """Add names to the metadata of a session, or of one of its turns, or replace their values.  Raises NotFound for
        either, and RequestError for too much."""
        session = self.get(owner, session_id)
        turn = None if turn_id is None else session.turns.get(turn_id)
        if turn_id is None:
            self._check_metadata(_size(session.metadata | metadata), now)
            self._set_metadata(session, session.metadata | metadata)
        else:
            if turn is None:
                raise NotFound(f"the session has no turn {turn_id[:MAX_ID]!r}", field="turn_id", code="turn_not_found")
            before, after = _size(turn.metadata), _size(turn.metadata | metadata)
            self._check_metadata(after, now)
            turn.metadata = turn.metadata | metadata
            self._grow(session, after - before)
        self._touch(session, now)
        self._observer.on_metadata(session, turn)
        return summary(session)

    def take(self, owner: str, lease: float, now: float) -> Session | None:
        """A closed session that no trainer has, the one closed first; it is the caller's for `lease` seconds, or until
        it is deleted."""
        closed = self._closed.get(owner)
        return None if closed is None else closed.take(lease, now)

    def next_lease_end(self, owner: str, now: float) -> float | None:
        """When the next lease of a closed session ends; None: there is none."""
        closed = self._closed.get(owner)
        return None if closed is None else closed.next_lease_end(now)

    def expire(self, now: float) -> int:
        """Drop sessions without use for too long; returns their number."""
        dropped = 0
        for session in list(self._sessions.values()):
            if session.last_used + self._ttl > now:
                break
            if not session.running:
                self._drop(session)
                dropped += 1
        return dropped

    def _check_bytes(self, now: float) -> None:
        """Raise QueueFull if sessions use as much memory as they may."""
        if self.num_bytes >= self._max_bytes:
            self.expire(now)
        if self.num_bytes >= self._max_bytes:
            raise QueueFull(
                f"sessions use {self.num_bytes} bytes, of {self._max_bytes} that they may (--max-session-bytes): close "
                "and delete sessions that were read",
                retry_after=1,
                code="session_bytes",
            )

    def _check_metadata(self, size: int, now: float) -> None:
        """Raise RequestError for too much, and QueueFull where only little is taken, such as a reward."""
        if size > MAX_METADATA:
            raise RequestError(f"metadata must have at most {MAX_METADATA} bytes as JSON, got {size}", field="metadata")
        if size > LITTLE_METADATA:
            self._check_bytes(now)

    def restore(self, session: Session, turns: Iterable[RestoredTurn]) -> None:
        """Add a session of an earlier server, which has no turns yet, and its turns, parents first.  `sort` follows."""
        self._sessions[session.owner, session.session_id] = session
        session.number = next(self._numbers)
        self._num_of_owner[session.owner] += 1
        self._grow(session, SESSION_BYTES + _size(session.metadata) - _size({}))
        for one in turns:
            turn = self._insert(session, one.turn_id, one.prompt, one.answer, one.created)
            turn.metadata = one.metadata
            self._grow(session, _size(turn.metadata) - _size({}))

    def sort(self) -> None:
        """Order the sessions by their last use."""
        self._sessions = dict(sorted(self._sessions.items(), key=lambda item: item[1].last_used))
        for session in self._sessions.values():
            if session.closed:
                self._closed.setdefault(session.owner, ClosedSessions()).add(session)

    def _make(self, owner: str, session_id: str, now: float) -> Session:
        check_id(session_id)
        if len(self._sessions) >= self._max_sessions:
            self.expire(now)
        if len(self._sessions) >= self._max_sessions:
            raise QueueFull(
                f"there are {len(self._sessions)} sessions, as many as there may be (--max-sessions): delete those "
                "that were read",
                retry_after=1,
                code="too_many_sessions",
            )
        if self._max_per_owner is not None and self._num_of_owner[owner] >= self._max_per_owner:
            raise QueueFull(
                f"this API key has {self._num_of_owner[owner]} sessions, as many as one may have "
                "(--max-sessions-per-key): delete those that were read",
                retry_after=1,
                code="too_many_sessions",
            )
        number = next(self._numbers)
        session = Session(session_id=session_id, owner=owner, created=now, last_used=now, number=number)
        self._sessions[owner, session_id] = session
        self._num_of_owner[owner] += 1
        self._grow(session, SESSION_BYTES)
        self._touch(session, now)
        self._observer.on_created(session)
        return session

    def _touch(self, session: Session, now: float) -> None:
        session.last_used = now
        session.change = self.num_changes = self.num_changes + 1
        key = session.owner, session.session_id
        self._sessions[key] = self._sessions.pop(key)

    def _drop(self, session: Session) -> None:
        del self._sessions[session.owner, session.session_id]
        self.num_bytes -= session.num_bytes
        if session.closed:
            self._closed[session.owner].discard(session.session_id)
            if not self._closed[session.owner]:
                del self._closed[session.owner]
        self._num_of_owner[session.owner] -= 1
        if not self._num_of_owner[session.owner]:
            del self._num_of_owner[session.owner]
        self._observer.on_dropped(session)

    def _grow(self, session: Session, num_bytes: int) -> None:
        session.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _set_metadata(self, session: Session, metadata: dict[str, Any]) -> None:
        self._grow(session, _size(metadata) - _size(session.metadata))
        session.metadata = metadata


def _matched(session: Session, turn: StoredTurn) -> Match:
    answer = turn.answer
    return Match(
        number=session.number,
        turn_id=turn.turn_id,
        ids=session.ids(turn),
        ended=answer.stop_detail in TERMINATORS,
        message=answer.message,
        num_messages=turn.num_messages,
    )


def summary(session: Session) -> Summary:
    return Summary(
        session_id=session.session_id,
        state=session.state,
        turns=session.num_turns,
        roots=session.num_roots,
        tokens=session.num_tokens,
        created=session.created,
        last_used=session.last_used,
        metadata=session.metadata,
        lease_end=session.lease_end,
    )


def _reason(session: Session, context: PromptContext, other: StoredTurn | None, digests: Sequence[bytes]) -> str:
    """Why a conversation continues no turn.  `other`: the deepest turn that it would continue in another context."""
    if not session.turns:
        return FIRST
    if other is not None:
        before = other.prompt.context
        if before.model != context.model:
            return f"the model differs: {before.model or 'the base model'!r} before"
        return "the tools differ" if before.tools != context.tools else "the template or its variables differ"
    shared = next((count for count in range(len(digests), 0, -1) if digests[count - 1] in session.prefixes), 0)
    if shared == len(digests):
        return "no message is an answer of the session"
    return f"message {shared} differs"


def _size(metadata: dict[str, Any]) -> int:
    return len(msgspec.json.encode(metadata))
