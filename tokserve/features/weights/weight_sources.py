"""Where the tensors of a live update come from: a checkpoint directory, shared memory, a safetensors byte stream.

Each turns a caller's announcement into (name, tensor) pairs and refuses contradictions before it reads.  Process groups
are in `rl/broadcast`.  Nothing is unpickled.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.base.errors import Forbidden, RequestError, invalid_value
from tokserve.models import formats
from tokserve.rl.broadcast import DTYPES, PACKED_BYTES, Declared, num_bytes

SHARED_MEMORY = Path("/dev/shm")
MAX_HEADER = 64 << 20


class SharedAllocation(msgspec.Struct, forbid_unknown_fields=True):
    """Memory of a GPU that a process of this machine has exported: the 64 bytes of its CUDA IPC handle in hex, its size
    in bytes, and the process."""

    handle: str
    size: int
    pid: int


class Announcement(msgspec.Struct, forbid_unknown_fields=True):
    """`update_info` of the backends that send tensors: parallel lists, in the order of sending.

    `segment`, `offsets`: name of a POSIX shared memory segment and the tensors' places in it, in bytes.
    `ipc_handles`: in place of a segment, memory of GPUs by their UUIDs, which all hold the same: one for each name, or
    one for all of them.
    `num_updates_list`: of a delta over a process group, how many elements of each tensor change.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False
    packed_buffer_size_bytes: int = PACKED_BYTES
    packed_num_buffers: int = 2
    is_checkpoint_format: bool = True
    segment: str | None = None
    offsets: list[int] | None = None
    ipc_handles: list[dict[str, SharedAllocation]] | None = None
    num_updates_list: list[int] | None = None

    @property
    def is_local(self) -> bool:
        """Whether the tensors are in memory of this machine, in place of a process group's."""
        return self.segment is not None or self.ipc_handles is not None

    def counts(self) -> list[int]:
        """The number of changed elements of each tensor of a delta.  Raises RequestError."""
        counts = self.num_updates_list
        if counts is None or len(counts) != len(self.names) or any(count < 0 for count in counts):
            raise RequestError(
                "a delta over a process group needs num_updates_list, with a count for every name",
                field="update_info.num_updates_list",
            )
        if self.packed:
            raise RequestError("a delta is not packed", field="update_info.packed")
        return counts

    def declared(self, dtypes: Mapping[str, torch.dtype] = DTYPES) -> list[Declared]:
        """The tensors; raises RequestError for lists that do not belong together and unknown dtypes."""
        for name in ("dtype_names", "shapes"):
            if len(getattr(self, name)) != len(self.names):
                raise RequestError(f"{name} and names must be of the same length", field=f"update_info.{name}")
        type_names = [name.removeprefix("torch.") for name in self.dtype_names]
        if unknown := sorted(set(type_names) - set(dtypes)):
            raise RequestError(
                f"unsupported dtype {unknown[0]!r}; there are: {', '.join(dtypes)}", field="update_info.dtype_names"
            )
        if any(size < 0 for shape in self.shapes for size in shape):
            raise RequestError("a shape has a negative size", field="update_info.shapes")
        types = [dtypes[name] for name in type_names]
        return [(n, d, tuple(s)) for n, d, s in zip(self.names, types, self.shapes, strict=True)]


def announcement(source: dict[str, Any]) -> Announcement:
    """`source` with its types checked."""
    if "ipc_handles_pickled" in source:
        raise RequestError(
            "ipc_handles_pickled is a pickle, and nothing is unpickled here: give ipc_handles as JSON (docs/rl.md)",
            field="update_info.ipc_handles_pickled",
        )
    try:
        announced = msgspec.convert(source, Announcement)
    except msgspec.ValidationError as error:
        raise invalid_value(error, "update_info") from None
    if announced.ipc_handles is not None and announced.segment is not None:
        raise RequestError("give ipc_handles or a segment, not both", field="update_info.ipc_handles")
    return announced


class NoDirectory(RequestError):
    """The directory is not there."""


def allowed_directory(name: str, allowed: Sequence[str] | None, field: str = "weight_dir") -> Path:
    """The directory, with links followed; Forbidden if it is not below one of `allowed`."""
    if not name:
        raise RequestError(f"{field} must not be empty", field=field)
    try:
        path = Path(os.path.realpath(os.path.expanduser(name)))
        is_there = path.is_dir()
    except (ValueError, OSError):  # a zero byte, what no file system can say, or a name that is too long
        raise RequestError(f"{field} is not a path", field=field) from None
    if not _is_within(path, allowed):
        raise Forbidden(f"{name} is not within --allowed-weight-dirs", field=field)
    if not is_there:
        raise NoDirectory(f"no directory {name}", field=field)
    return path


def check_files(directory: Path, names: Sequence[str], allowed: Sequence[str] | None, field: str) -> None:
    """Forbidden if one of the directory's files is a link to somewhere else than below one of `allowed`."""
    for name in names:
        if not _is_within(Path(os.path.realpath(directory / name)), allowed):
            raise Forbidden(f"{name} of {directory} is a link out of --allowed-weight-dirs", field=field)


def _is_within(path: Path, allowed: Sequence[str] | None) -> bool:
    return allowed is None or any(path.is_relative_to(os.path.realpath(parent)) for parent in allowed)


def shared_memory(announced: Announcement, declared: Sequence[Declared]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) from a segment; tensors are views of it, valid until the next one is taken."""
    segment, offsets = announced.segment, announced.offsets
    if segment is None or offsets is None or len(offsets) != len(declared):
        raise RequestError("ipc needs a segment, and an offset for every name", field="update_info.segment")
    name = segment.removeprefix("/")
    if not name.isprintable() or "/" in name or name in ("", ".", ".."):
        raise RequestError(f"{segment!r} is not the name of a shared memory segment", field="update_info.segment")
    try:
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        reason = f"shared memory {segment!r}: {error.strerror}"
        raise RequestError(reason, field="update_info.segment") from None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise RequestError(f"{segment!r} is not a shared memory segment", field="update_info.segment")
        size = state.st_size
        for (key, dtype, shape), offset in zip(declared, offsets, strict=True):
            count = num_bytes((key, dtype, shape))
            if offset < 0 or offset % dtype.itemsize or offset + count > size:
                raise RequestError(
                    f"{key}: bytes {offset} to {offset + count} do not lie, aligned, in the segment of {size}",
                    field="update_info.offsets",
                )
        mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) if size else bytearray()
        memory: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
    finally:
        os.close(descriptor)
    for (key, dtype, shape), offset in zip(declared, offsets, strict=True):
        part = memory[offset : offset + num_bytes((key, dtype, shape))]
        yield key, torch.from_numpy(part).view(dtype).view(shape)


class HeaderEntry(msgspec.Struct):
    """A tensor in a safetensors header; `data_offsets`: where its bytes begin and end, after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsStream:
    """A safetensors file that comes in pieces; holds one tensor at a time.

    `begin` is called once with the file's metadata, then `announce` with all names, shapes and dtypes, and `put` with
    each tensor when it is complete.  `dtypes`: those that it may have, by their names in such files.
    """

    def __init__(
        self,
        announce: Callable[[list[tuple[str, tuple[int, ...], torch.dtype | str]]], None],
        put: Callable[[str, Tensor], None],
        begin: Callable[[dict[str, str]], None] = lambda metadata: None,
        dtypes: Mapping[str, torch.dtype] = formats.DTYPES | formats.INTEGERS,
    ) -> None:
        self._announce = announce
        self._put = put
        self._begin = begin
        self._dtypes = dtypes
        self._head = bytearray()  # until the header is complete
        self._header_size: int | None = None
        self._entries: list[Declared] = []  # in the order of the file
        self._tensor: Tensor | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)  # of the tensor
        self._filled = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        rest = memoryview(chunk)
        if self._header_size is None or len(self._head) < self._header_size:
            rest = self._feed_header(rest)
        while self._next() and rest:
            count = min(len(rest), len(self._bytes) - self._filled)
            self._bytes[self._filled : self._filled + count] = np.frombuffer(rest[:count], np.uint8)
            self._filled += count
            rest = rest[count:]
        if rest:
            raise RequestError("the body has bytes after its last tensor")

    def end(self) -> None:
        """No more bytes come."""
        if self._header_size is None or len(self._head) < self._header_size or self._next():
            raise RequestError("the body ends before its last tensor does: it was truncated")

    def _feed_header(self, rest: memoryview) -> memoryview:
        """The bytes after the header, once it is complete."""
        if self._header_size is None:
            missing = 8 - len(self._head)
            self._head += rest[:missing]
            rest = rest[missing:]
            if len(self._head) < 8:
                return rest
            self._header_size = int.from_bytes(self._head, "little")
            self._head.clear()
            if not 2 <= self._header_size <= MAX_HEADER:
                raise RequestError(f"this is not a safetensors file: its header would have {self._header_size} bytes")
        missing = self._header_size - len(self._head)
        self._head += rest[:missing]
        if len(self._head) == self._header_size:
            metadata, described = _header(bytes(self._head))
            self._begin(metadata)
            self._entries = _entries(described, self._dtypes)
            self._announce([(name, shape, dtype) for name, dtype, shape in self._entries])
            self._entries.reverse()
        return rest[missing:]

    def _next(self) -> bool:
        """Hand over complete tensors; whether there is one to be filled."""
        while self._tensor is None or self._filled == len(self._bytes):
            if self._tensor is not None:
                self._put(self._entries.pop()[0], self._tensor)
                self._tensor = None
            if not self._entries:
                return False
            _, dtype, shape = self._entries[-1]
            self._tensor = torch.empty(shape, dtype=dtype)
            self._bytes = self._tensor.view(-1).view(torch.uint8).numpy()
            self._filled = 0
        return True


def _header(header: bytes) -> tuple[dict[str, str], dict[str, HeaderEntry]]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        return metadata, {name: msgspec.json.decode(entry, type=HeaderEntry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("this is not a safetensors file: its header cannot be read") from None


def _entries(described: Mapping[str, HeaderEntry], dtypes: Mapping[str, torch.dtype]) -> list[Declared]:
    """The tensors of a header in the order of their bytes, which must follow each other without gaps."""
    rows = [(*entry.data_offsets, name, entry.dtype, entry.shape) for name, entry in described.items()]
    entries: list[Declared] = []
    position = 0
    for begin, end, name, dtype, shape in sorted(rows):
        if dtype not in dtypes:
            raise RequestError(f"{name} is of the unsupported dtype {dtype}")
        declared = (name, dtypes[dtype], shape)
        if any(size < 0 for size in shape) or begin != position or end - begin != num_bytes(declared):
            raise RequestError(f"the header contradicts itself at {name}")
        entries.append(declared)
        position = end
    return entries
