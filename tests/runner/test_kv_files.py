"""KV blocks as files: reading what was written, with faults of the disk, and the size limit."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tokserve.base.errors import StartError
from tokserve.features.kv import kv_files
from tokserve.features.kv.kv_files import HEADER_BYTES, BlockFiles, FileError

ID, OTHER = b"i" * 32, b"o" * 32
SIZE = 1000


def content(number: int) -> memoryview:
    return memoryview(bytes([number]) * SIZE)


def key(number: int) -> bytes:
    return bytes([number]) * 32


def files(path: Path, count: int = 10) -> BlockFiles:
    return BlockFiles(str(path), count * (SIZE + HEADER_BYTES), SIZE)


def read(block_files: BlockFiles, number: int, identity: bytes = ID) -> bytes | None:
    buffer = bytearray(SIZE)
    return bytes(buffer) if block_files.read(identity, key(number), memoryview(buffer)) else None


def path_of(root: Path, number: int) -> Path:
    return next(root.glob(f"*/*/{key(number).hex()}.kv"))


def test_what_was_written_is_read_by_this_process_and_the_next(tmp_path: Path) -> None:
    block_files = files(tmp_path / "new")
    assert block_files.write(ID, key(1), content(1)) == (True, [])
    assert (
        read(block_files, 1) == bytes(content(1))
        and read(block_files, 2) is None
        and read(block_files, 1, OTHER) is None
    )
    assert path_of(tmp_path / "new", 1).stat().st_mode & 0o777 == 0o600
    later = files(tmp_path / "new")
    assert later.use(ID, {"weights": "w"}) == [key(1)] and later.use(OTHER, {}) == []
    assert read(later, 1) == bytes(content(1))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    changed = bytearray(path.read_bytes())
    changed[HEADER_BYTES + 500] ^= 1
    path.write_bytes(changed)


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def replace(path: Path) -> None:
    path.write_bytes(path_of(path.parent.parent.parent, 2).read_bytes())


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, extend, replace, empty])
def test_damage_is_noticed_and_the_file_deleted(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    block_files = files(tmp_path)
    for number in (1, 2):
        block_files.write(ID, key(number), content(number))
    path = path_of(tmp_path, 1)
    damage(path)
    with pytest.raises(FileError):
        read(block_files, 1)
    assert not path.exists() and read(block_files, 1) is None and read(block_files, 2) == bytes(content(2))


def test_the_least_recently_used_files_are_deleted(tmp_path: Path) -> None:
    block_files = files(tmp_path, 3)
    block_files.write(OTHER, key(9), content(9))
    block_files.write(ID, key(1), content(1))
    block_files.write(ID, key(2), content(2))
    assert block_files.write(ID, key(3), content(3)) == (True, [])  # the other identity's goes first
    assert read(block_files, 1) is not None
    assert block_files.write(ID, key(4), content(4)) == (True, [key(2)])
    for age, number in ((30, 4), (20, 1), (10, 3)):
        moment = path_of(tmp_path, number).stat().st_mtime - age
        os.utime(path_of(tmp_path, number), (moment, moment))
    assert files(tmp_path, 3).write(ID, key(5), content(5)) == (True, [key(4)])


def test_a_block_that_is_written_again_counts_once(tmp_path: Path) -> None:
    block_files = files(tmp_path)
    assert [block_files.write(ID, key(1), content(number)) for number in (1, 2)] == [(True, [])] * 2
    assert block_files.num_bytes == SIZE + HEADER_BYTES and read(block_files, 1) == bytes(content(2))


def test_files_of_other_processes_are_found_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = files(tmp_path, 3), files(tmp_path, 3)
    for number in (1, 2, 3):
        one.write(ID, key(number), content(number))
    assert read(two, 2) == bytes(content(2))
    monkeypatch.setattr(kv_files, "SCAN_WRITES", 1)
    two.write(ID, key(4), content(4))
    assert len(list(tmp_path.glob("*/*/*.kv"))) == 3


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / ID.hex() / "01" / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    part = foreign.with_name("x.1.1.tmp")
    part.write_text("cut off")
    os.utime(part, (1, 1))
    block_files = files(tmp_path, 1)
    for number in (1, 2, 3):
        block_files.write(ID, key(number), content(number))
    block_files.clear()
    assert foreign.read_text() == "mine" and not part.exists() and not list(tmp_path.glob("*/*/*.kv"))


def test_writes_to_a_full_disk_are_tried_again_occasionally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block_files = files(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        assert block_files.write(ID, key(1), content(1)) == (False, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [path for path in tmp_path.glob("*/*/*") if path.is_file()]
    assert block_files.write(ID, key(1), content(1)) == (False, []) and read(block_files, 1) is None
    monkeypatch.setattr(kv_files, "RETRY_SECONDS", 0.0)
    assert block_files.write(ID, key(1), content(1)) == (True, [])


def test_a_directory_that_cannot_be_made_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="kv_offloading_dir"):
        files(tmp_path / "file" / "below")
