"""Sessions as files: JSON lines in a directory, one file for each session, which a later server reads.

A line is `{"crc32": N, "record": {...}}`, with the checksum of the record's bytes.  The first record has the version of
the format and whose session it is; then come turns, metadata and the end of the session, as they happened.  A turn is
written before its reply is sent, so a server that is killed has written all turns that ended.  The files are not
synced: they outlive the server, and not always its machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokserve.base.errors import RequestError, StartError
from tokserve.features.sessions.store import SessionStore, StoreObserver, check_id
from tokserve.features.sessions.turns import Session, StoredTurn, TurnAnswer, TurnPrompt

logger = logging.getLogger(__name__)
VERSION = 1
LOCK = "lock"
SUFFIX, TEMPORARY = ".jsonl", ".tmp"
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
SLACK = 1 << 20  # bytes that a file may be longer than four times its session's memory: then it is written anew


class FileHeader(msgspec.Struct, tag="session", tag_field="kind"):
    """The first record of a file.  `owner`: "" or the digest of an API key.  `created`: seconds of Unix time."""

    version: int
    session_id: str
    owner: str
    created: float


class FileTurn(msgspec.Struct, tag="turn", tag_field="kind"):
    """A turn.  Bytes are base64: ids are little-endian int32, logprobs float32."""

    turn_id: str
    created: float
    prompt: TurnPrompt
    answer: TurnAnswer
    metadata: dict[str, Any] = {}


class MetadataChange(msgspec.Struct, tag="metadata", tag_field="kind"):
    """The metadata of the session or of one of its turns, which replaces what was there."""

    metadata: dict[str, Any]
    turn_id: str | None = None


class FileEnd(msgspec.Struct, tag="closed", tag_field="kind"):
    """The session was closed."""


Record = FileHeader | FileTurn | MetadataChange | FileEnd


class FileLine(msgspec.Struct):
    """A line of a file."""

    crc32: int
    record: msgspec.Raw


class UnreadableFile(Exception):
    """A file that holds no session; the text says why."""


_LINES: msgspec.json.Decoder[FileLine] = msgspec.json.Decoder(FileLine)
_RECORDS: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class SessionFiles(StoreObserver):
    """The files of a store in `directory`, which no other server may use.  Raises StartError.

    A failed write is logged, and refuses no request: the file is written anew with the session's next change.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._directory / LOCK, FLAGS, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise StartError(f"option session_dir: another server keeps its sessions in {directory}") from None
        except OSError as error:
            raise StartError(f"option session_dir: {directory} cannot be used: {error.strerror}") from None
        self._paths: dict[tuple[str, str], Path] = {}
        self._sizes: dict[Path, int] = {}
        self._stale: set[Path] = set()  # files that are not what the store has
        self._failing = False

    @property
    def num_stale(self) -> int:
        """Sessions whose last change is not in their files."""
        return len(self._stale)

    def close(self) -> None:
        """Let another server use the directory."""
        os.close(self._lock)

    def load(self, store: SessionStore) -> None:
        """Add the sessions of the files to the store, those that were changed last first, while there is room.  What
        cannot be read is logged with the file's name, and stays."""
        start, unread = time.monotonic(), 0
        for path in self._directory.glob(f"*{TEMPORARY}"):
            path.unlink(missing_ok=True)
        for path, changed in sorted(self._listed(), key=lambda item: item[1], reverse=True):
            if store.is_full:
                unread += 1
                logger.warning("sessions: %s is not read: --max-sessions or --max-session-bytes is reached", path)
                continue
            try:
                self._load_file(store, path, changed)
            except (UnreadableFile, OSError) as error:
                unread += 1
                logger.warning("sessions: %s is not read: %s", path, error)
        store.sort()
        if len(store) or unread:
            seconds = time.monotonic() - start
            logger.info(
                "sessions: %d read from %s in %.1f s, %d files not read", len(store), self._directory, seconds, unread
            )

    def _listed(self) -> Iterator[tuple[Path, float]]:
        for path in self._directory.glob(f"*{SUFFIX}"):
            try:
                yield path, path.stat().st_mtime
            except OSError as error:
                logger.warning("sessions: %s is not read: %s", path, error)

    def _load_file(self, store: SessionStore, path: Path, changed: float) -> None:
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        session, turns = _session(content[:end].split(b"\n")[:-1], changed)
        key = session.owner, session.session_id
        if key in self._paths:
            raise UnreadableFile(f"{self._paths[key].name} has a later session with the same id")
        store.restore(session, turns)
        self._paths[key], self._sizes[path] = path, end
        if end < len(content):
            logger.warning("sessions: the last line of %s is not complete: what is before it was read", path)
            self._stale.add(path)

    def on_created(self, session: Session) -> None:
        name = hashlib.blake2b(f"{session.owner}/{session.session_id}".encode(), digest_size=16).hexdigest()
        path = self._directory / f"{name}-{time.time_ns():x}{SUFFIX}"
        self._paths[session.owner, session.session_id] = path
        self._sizes[path] = 0
        self._write(session, _header(session))

    def on_turn(self, session: Session, turn: StoredTurn) -> None:
        self._write(session, _turn(turn))

    def on_metadata(self, session: Session, turn: StoredTurn | None) -> None:
        record = MetadataChange(session.metadata) if turn is None else MetadataChange(turn.metadata, turn.turn_id)
        self._write(session, record)

    def on_closed(self, session: Session) -> None:
        self._write(session, FileEnd())

    def on_dropped(self, session: Session) -> None:
        path = self._paths.pop((session.owner, session.session_id))
        self._sizes.pop(path)
        self._stale.discard(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.error("sessions: %s cannot be removed: %s", path, error.strerror)

    def _write(self, session: Session, record: Record) -> None:
        """Write a record, or the whole file if it is stale or has much that was replaced."""
        path = self._paths[session.owner, session.session_id]
        is_long = self._sizes[path] > 4 * session.num_bytes + SLACK
        try:
            if path in self._stale or is_long:
                self._write_anew(path, session)
            else:
                line = _line(record)
                _write_all(path, FLAGS | os.O_APPEND, [line])
                self._sizes[path] += len(line)
        except OSError as error:
            self._stale.add(path)
            if not self._failing:
                logger.error("sessions: %s cannot be written: %s; requests are answered as ever", path, error.strerror)
            self._failing = True
        else:
            self._stale.discard(path)
            self._failing = False

    def _write_anew(self, path: Path, session: Session) -> None:
        temporary = path.with_suffix(TEMPORARY)
        self._sizes[path] = _write_all(temporary, FLAGS | os.O_TRUNC, map(_line, _records(session)))
        temporary.replace(path)


def _records(session: Session) -> Iterator[Record]:
    yield _header(session)
    yield from map(_turn, session.turns.values())
    if session.metadata:
        yield MetadataChange(session.metadata)
    if session.closed:
        yield FileEnd()


def _header(session: Session) -> FileHeader:
    return FileHeader(VERSION, session.session_id, session.owner, session.created)


def _turn(turn: StoredTurn) -> FileTurn:
    return FileTurn(turn.turn_id, turn.created, turn.prompt, turn.answer, turn.metadata)


def _line(record: Record) -> bytes:
    encoded = msgspec.json.encode(record)
    return b'{"crc32":%d,"record":%s}\n' % (zlib.crc32(encoded), encoded)


def _write_all(path: Path, flags: int, lines: Iterator[bytes] | list[bytes]) -> int:
    """Write the lines to a file; returns their bytes."""
    size = 0
    with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        for line in lines:
            rest = memoryview(line)
            while rest:
                rest = rest[file.write(rest) :]
            size += len(line)
    return size


def _session(lines: list[bytes], changed: float) -> tuple[Session, list[FileTurn]]:
    """The session of a file without its turns, and these.  Raises UnreadableFile."""
    if not lines:
        raise UnreadableFile("it has no complete line")
    header = _record(lines[0], 1)
    if not isinstance(header, FileHeader):
        raise UnreadableFile("its first line is no header")
    if header.version != VERSION:
        raise UnreadableFile(f"its version is {header.version}, and this program reads {VERSION}")
    try:
        check_id(header.session_id)
    except RequestError as error:
        raise UnreadableFile(error.message) from None
    session = Session(session_id=header.session_id, owner=header.owner, created=header.created, last_used=changed)
    turns: dict[str, FileTurn] = {}
    for number, line in enumerate(lines[1:], 2):
        match _record(line, number):
            case FileTurn() as turn:
                if turn.turn_id in turns or not (turn.prompt.parent is None or turn.prompt.parent in turns):
                    raise UnreadableFile(f"line {number}: the turn {turn.turn_id} does not follow those before it")
                turns[turn.turn_id] = turn
            case MetadataChange(metadata, None):
                session.metadata = metadata
            case MetadataChange(metadata, turn_id) if turn_id in turns:
                turns[turn_id].metadata = metadata
            case FileEnd():
                session.closed = True
            case other:
                raise UnreadableFile(f"line {number}: a record {type(other).__name__} does not belong here")
    return session, list(turns.values())


def _record(line: bytes, number: int) -> Record:
    try:
        parsed = _LINES.decode(line)
        if zlib.crc32(parsed.record) != parsed.crc32:
            raise UnreadableFile(f"line {number}: the checksum is another")
        return _RECORDS.decode(parsed.record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"line {number}: {error}") from None
