"""KV blocks as files: a directory per identity, a file per block, checked when it is read, bounded in bytes together.

A file is written under another name and then renamed, so that no reader sees a part of it, and several processes may
share the directory.  What cannot be read as it was written is deleted and counts as absent: nothing here raises for the
state of the disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec

from tokserve.base.errors import StartError

logger = logging.getLogger(__name__)

MAGIC = b"TOKKV\0\0\1"
FILE = re.compile(r"[0-9a-f]{64}\.kv")
IDENTITY = re.compile(r"[0-9a-f]{64}")
CHECK_BYTES = 32  # of SHA-256
HEADER_BYTES = len(MAGIC) + 32 + 32 + 8 + CHECK_BYTES  # identity, key, length of the content, checksum
STALE_SECONDS = 600.0  # after which a file that was not renamed has no writer any more
RETRY_SECONDS = 10.0  # from a failed write to the next attempt
SCAN_WRITES = 1024  # after which files of other processes are counted again
Buffer = memoryview


class FileError(Exception):
    """A file is not what was written: cut off, changed, or of something else."""


def header(identity: bytes, key: bytes, content: Buffer) -> bytes:
    """The bytes before the content."""
    start = MAGIC + identity + key + len(content).to_bytes(8, "little")
    digest = hashlib.sha256(start)
    digest.update(content)
    return start + digest.digest()


class BlockFiles:
    """All files under `directory`.  Writing is for one thread, reading for another.  Raises StartError if the directory
    cannot be made."""

    def __init__(self, directory: str, max_bytes: int, content_bytes: int) -> None:
        self._root = Path(directory)
        self._max_bytes = max_bytes
        self._file_bytes = HEADER_BYTES + content_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # least recently used first
        self._total = 0
        self._failed = -RETRY_SECONDS
        self._numbers = 0
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._scan()
        except OSError as error:
            raise StartError(f"option kv_offloading_dir: {directory}: {error.strerror}") from None

    def _scan(self) -> None:
        """Learn which files there are, other processes' too, and delete what writers that died have left."""
        entries = []
        now = time.time()
        for path in self._root.glob("*/*/*"):
            with suppress(OSError):
                status = path.stat()
                if FILE.fullmatch(path.name) and IDENTITY.fullmatch(path.parent.parent.name):
                    entries.append((status.st_mtime, path, status.st_size))
                elif path.suffix == ".tmp" and now - status.st_mtime > STALE_SECONDS:
                    path.unlink()
        with self._lock:
            self._sizes = OrderedDict((path, size) for _, path, size in sorted(entries))
            self._total = sum(self._sizes.values())

    def use(self, identity: bytes, parts: dict[str, str]) -> list[bytes]:
        """The keys of this identity's files.  `parts`: what it stands for, kept beside them."""
        with self._lock:
            directory = self._root / identity.hex()
            with suppress(OSError):
                directory.mkdir(exist_ok=True, mode=0o700)
                (directory / "identity.json").write_bytes(msgspec.json.format(msgspec.json.encode(parts)))
            return [bytes.fromhex(path.stem) for path in self._sizes if path.parent.parent == directory]

    def _path(self, identity: bytes, key: bytes) -> Path:
        name = key.hex()
        return self._root / identity.hex() / name[:2] / f"{name}.kv"

    def read(self, identity: bytes, key: bytes, content: Buffer) -> bool:
        """Read a block's file into `content`, whose bytes mean nothing if there is none (False) or it is damaged
        (FileError)."""
        path = self._path(identity, key)
        try:
            self._read(path, identity, key, content)
        except FileNotFoundError:
            self._forget(path)
            return False
        except (OSError, FileError) as error:
            logger.warning("a file of KV blocks is of no use, and is deleted: %s: %s", path.name, error)
            self._delete(path)
            raise FileError(str(error)) from None
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
            else:  # another process has written it
                self._sizes[path] = self._file_bytes
                self._total += self._file_bytes
        with suppress(OSError):
            os.utime(path)
        return True

    @staticmethod
    def _read(path: Path, identity: bytes, key: bytes, content: Buffer) -> None:
        start = MAGIC + identity + key + len(content).to_bytes(8, "little")
        with open(path, "rb", buffering=0) as file:
            head = file.read(HEADER_BYTES)
            if head[: len(start)] != start or len(head) != HEADER_BYTES:
                raise FileError("its header is not that of this block")
            done = 0
            while done < len(content):
                count = file.readinto(content[done:])
                if not count:
                    raise FileError("it is cut off")
                done += count
            if file.read(1):
                raise FileError("it is too long")
        digest = hashlib.sha256(start)
        digest.update(content)
        if digest.digest() != head[len(start) :]:
            raise FileError("its checksum is wrong")

    def write(self, identity: bytes, key: bytes, content: Buffer) -> tuple[bool, list[bytes]]:
        """Keep a block as a file: whether that was done, and the keys of this identity whose files were deleted to make
        room.  After a failure no attempt is made for some seconds."""
        if time.monotonic() - self._failed < RETRY_SECONDS:
            return False, []
        path = self._path(identity, key)
        self._numbers += 1
        if self._numbers % SCAN_WRITES == 0:
            with suppress(OSError):
                self._scan()
        deleted = self._make_room(identity)
        part = path.with_name(f"{path.stem}.{os.getpid()}.{self._numbers}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write(part, header(identity, key, content), content)
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            self._failed = time.monotonic()
            logger.warning("KV blocks cannot be written to %s: %s", self._root, error.strerror)
            return False, deleted
        with self._lock:
            self._total += self._file_bytes - self._sizes.pop(path, 0)
            self._sizes[path] = self._file_bytes
        return True, deleted

    @staticmethod
    def _write(part: Path, head: bytes, content: Buffer) -> None:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for piece in (memoryview(head), content):
                done = 0
                while done < len(piece):
                    done += os.write(descriptor, piece[done:])
        finally:
            os.close(descriptor)

    def _make_room(self, identity: bytes) -> list[bytes]:
        """Delete the files used least recently until one more fits."""
        deleted: list[bytes] = []
        while True:
            with self._lock:
                if self._total + self._file_bytes <= self._max_bytes or not self._sizes:
                    return deleted
                path = next(iter(self._sizes))
            if path.parent.parent.name == identity.hex():
                deleted.append(bytes.fromhex(path.stem))
            self._delete(path)

    def clear(self) -> None:
        with self._lock:
            paths = list(self._sizes)
        for path in paths:
            self._delete(path)

    def _delete(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()
        self._forget(path)

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._total -= self._sizes.pop(path, 0)

    @property
    def num_bytes(self) -> int:
        return self._total
