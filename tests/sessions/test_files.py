"""Sessions as files: what a later store reads, what it refuses, and writes that fail."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.sessions.simulation import CONTEXT
from tests.sessions.test_store import QUESTION, add
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.features.sessions.calls import make_service
from tokserve.features.sessions.canonical import chain
from tokserve.features.sessions.files import SessionFiles
from tokserve.features.sessions.store import SessionStore

NOW = 4e9  # after the times of all files


@contextmanager
def opened(directory: Path, **bounds: Any) -> Iterator[tuple[SessionStore, SessionFiles]]:
    """The store of a server that keeps its sessions in the directory."""
    files = SessionFiles(str(directory))
    values = {"max_sessions": 10, "max_bytes": 1 << 30, "ttl": 1e9} | bounds
    store = SessionStore(**values, observer=files)
    files.load(store)
    try:
        yield store, files
    finally:
        files.close()


def write(directory: Path, turns: int = 3) -> list[dict[str, Any]]:
    """A session "s" with so many turns and metadata; returns the messages of its next request."""
    messages = [QUESTION]
    with opened(directory) as (store, _):
        for index in range(turns):
            messages = add(store, messages, f"a{index}", NOW)
        store.add_metadata("", "s", {"reward": 0.5, "big": 10**30}, None, NOW)
        store.add_metadata("", "s", {"step": 1}, "t1", NOW)
    return messages


def file_of(directory: Path) -> Path:
    (path,) = directory.glob("*.jsonl")
    return path


def test_a_later_store_has_the_same_sessions(tmp_path: Path) -> None:
    messages = write(tmp_path)
    with opened(tmp_path) as (store, _):
        first = store.get("", "s")
        assert list(first.turns) == ["t0", "t1", "t2"] and first.state == "idle"
        assert (first.metadata, first.turns["t1"].metadata) == ({"reward": 0.5, "big": 10**30}, {"step": 1})
        match = store.match("", "s", CONTEXT, chain(messages), NOW)
        assert (match.turn_id, match.ids) == ("t2", first.ids(first.turns["t2"]))
        add(store, messages, "b", NOW)
        store.close("", "s", NOW)
        store.create("key", "s", {"x": 1}, NOW)
        size, expected = store.num_bytes, msgspec.json.encode(store.get("", "s").turns)
    with opened(tmp_path) as (store, _):
        second = store.get("", "s")
        assert msgspec.json.encode(second.turns) == expected and list(second.turns)[-1] == "t3"
        assert second.closed and store.num_bytes == size
        assert store.get("key", "s").metadata == {"x": 1}
        store.delete("", "s")
        assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_a_line_that_was_cut_costs_this_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = write(tmp_path)
    path = file_of(tmp_path)
    content = path.read_bytes()
    last_turn = content.index(b'"turn_id":"t2"')
    path.write_bytes(content[: last_turn + 20])
    with opened(tmp_path) as (store, files):
        assert list(store.get("", "s").turns) == ["t0", "t1"] and files.num_stale == 1
        assert f"the last line of {path} is not complete" in caplog.text
        add(store, messages[:5], "later", NOW)
        assert files.num_stale == 0
    with opened(tmp_path) as (store, _):
        assert list(store.get("", "s").turns) == ["t0", "t1", "t2"]


def flip(content: bytes) -> bytes:
    place = content.index(b'"token_ids":"') + 13
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def changed_header(**fields: Any) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        first, rest = content.split(b"\n", 1)
        record = json.dumps(json.loads(first)["record"] | fields).encode()
        return b'{"crc32":%d,"record":%s}\n' % (zlib.crc32(record), record) + rest

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip, "line 2: the checksum is another"),
        (lambda content: b"", "it has no complete line"),
        (lambda content: b"\0" * 4096 + b"\n", "line 1: "),
        (lambda content: b"\xff\n" + content, "line 1: "),
        (lambda content: content.split(b"\n", 1)[1], "its first line is no header"),
        (lambda content: content.replace(content.split(b"\n")[1] + b"\n", b""), "line 2: the turn t1 does not follow"),
        (lambda content: content + content, "line 7: a record FileHeader does not belong here"),
        (changed_header(version=2), "its version is 2, and this program reads 1"),
        (changed_header(session_id="../x"), "session_id must be 1 to 256 printable"),
        (changed_header(owner=5), "line 1: Expected `str`, got `int`"),
    ],
)
def test_a_file_that_is_no_session_is_named_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[bytes], bytes], reason: str
) -> None:
    write(tmp_path)
    path = file_of(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with opened(tmp_path) as (store, _):
        assert len(store) == store.num_bytes == 0
        assert f"{path} is not read: {reason}" in caplog.text
        add(store, [QUESTION], "new", NOW)
    assert path.exists() and len(list(tmp_path.glob("*.jsonl"))) == 2
    with opened(tmp_path) as (store, _):
        assert store.get("", "s").turns["t0"].answer.message["content"] == "new"


def test_a_folder_among_the_files_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.jsonl").mkdir()
    with opened(tmp_path) as (store, _):
        assert len(store) == 0 and "x.jsonl is not read" in caplog.text


def test_only_as_many_are_read_as_there_may_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as (store, _):
        for name in ("a", "b", "c"):
            store.create("", name, {}, NOW)
    with opened(tmp_path, max_sessions=2) as (store, _):
        assert len(store) == 2 and caplog.text.count("--max-sessions or --max-session-bytes is reached") == 1
    assert len(list(tmp_path.glob("*.jsonl"))) == 3


def test_metadata_that_is_replaced_does_not_grow_the_file(tmp_path: Path) -> None:
    with opened(tmp_path) as (store, _):
        store.create("", "s", {}, NOW)
        for index in range(100):
            store.add_metadata("", "s", {"x": f"{index}" * 20_000}, None, NOW)
        assert file_of(tmp_path).stat().st_size < 2 << 20
    with opened(tmp_path) as (store, _):
        assert store.get("", "s").metadata == {"x": "99" * 20_000}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failed_write_is_logged_and_made_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "made" / "here"
    with opened(directory) as (store, files):
        messages = add(store, [QUESTION], "a", NOW)
        aside = directory.rename(tmp_path / "aside")
        messages = add(store, messages, "b", NOW)
        messages = add(store, messages, "c", NOW)
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1 and "cannot be written: No such file or directory" in caplog.text
        assert files.num_stale == 1
        aside.rename(directory)
        add(store, messages, "d", NOW)
        assert files.num_stale == 0
    with opened(directory) as (store, _):
        assert list(store.get("", "s").turns) == ["t0", "t1", "t2", "t3"]


def test_a_directory_is_of_one_server(tmp_path: Path) -> None:
    config = Config.make(sessions=True, session_dir=str(tmp_path))
    service = make_service(config)
    with pytest.raises(StartError, match="another server keeps its sessions in"):
        make_service(config)
    assert service.files is not None
    service.files.close()
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"option session_dir: .*file/x cannot be used: Not a directory"):
        make_service(Config.make(sessions=True, session_dir=str(tmp_path / "file" / "x")))


def test_files_are_for_their_user_only(tmp_path: Path) -> None:
    directory = tmp_path / "sessions"
    write(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
