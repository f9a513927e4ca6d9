"""The header of a GGUF file: metadata, and where each tensor lies.  No tensor is read, and nothing is trusted.

Every count and length is compared with the bytes that are left in the file before anything of that size is read or
allocated.  The format is described in ggml's docs/gguf.md; versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokserve.base.errors import StartError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4
MAX_SIZE = 1 << 40  # elements of a tensor
MAX_NAME = 256  # bytes of a tensor's name
SMALLEST_PAIR, SMALLEST_TENSOR = 13, 25  # bytes
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
TYPES = {  # number -> name, elements and bytes of a block
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    39: ("MXFP4", 32, 17),
}
OTHER_TYPES = {  # that are not read, for messages
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` as torch has it, the slowest dimension first; `start`, `size`: its bytes in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file, or of all shards together."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """ggml's name of the architecture."""
        return str(self.metadata.get("general.architecture", ""))


def read_headers(path: Path) -> GgufHeader:
    """The header of a file, and of the other shards if it is one of several.  Raises StartError."""
    files = _shards(path)
    first, *rest = (read_header(file) for file in files)
    count = first.metadata.get("split.count", 1)
    if count != len(files):
        raise StartError(f"{path.name} says that it is one of {count} files; name a file -00001-of-{count:0>5}.gguf")
    tensors = dict(first.tensors)
    for header in rest:
        if duplicates := tensors.keys() & header.tensors.keys():
            raise StartError(f"{header.files[0].name} holds {min(duplicates)}, which an earlier shard holds, too")
        tensors |= header.tensors
    return GgufHeader(files, first.metadata, tensors)


def _shards(path: Path) -> tuple[Path, ...]:
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    total = int(match[3])
    if not 1 <= total <= 1000:
        raise StartError(f"{path.name} names an impossible number of shards")
    files = tuple(path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, total + 1))
    if absent := [file.name for file in files if not file.is_file()]:
        raise StartError(f"{path.name} is one of {total} files, and {absent[0]} is not there")
    return files


def read_header(path: Path) -> GgufHeader:
    """The header of one file.  Raises StartError, naming what is wrong."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise StartError(f"{path} is not a GGUF file: it has fewer bytes than a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                return _Reader(path, view).header()
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    def __init__(self, path: Path, content: memoryview) -> None:
        self._path, self._content, self._at = path, content, 0

    def _error(self, what: str) -> StartError:
        return StartError(f"{self._path} is not a valid GGUF file: {what}")

    def _left(self) -> int:
        return len(self._content) - self._at

    def _take(self, form: str) -> Any:
        size = struct.calcsize("<" + form)
        if size > self._left():
            raise self._error(f"it ends within its header, at byte {len(self._content)}")
        (value,) = struct.unpack_from("<" + form, self._content, self._at)
        self._at += size
        return value

    def _count(self, smallest: int, what: str) -> int:
        """A number of things of at least `smallest` bytes each."""
        count: int = self._take("Q")
        if count * smallest > self._left():
            raise self._error(f"it announces {count} {what}, for which it is too short")
        return count

    def _text(self, what: str, most: int | None = None) -> str:
        size = self._count(1, f"bytes of {what}")
        if most is not None and size > most:
            raise self._error(f"{what} has {size} bytes, more than {most}")
        raw = bytes(self._content[self._at : self._at + size])
        self._at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not UTF-8") from None

    def header(self) -> GgufHeader:
        if bytes(self._content[:4]) != MAGIC:
            raise self._error("it does not begin with GGUF")
        self._at = 4
        version = self._take("I")
        if version not in VERSIONS:
            is_big_endian = version in (v << 24 for v in (1, *VERSIONS))
            raise self._error("it is big-endian" if is_big_endian else f"its version is {version}; 2 and 3 are read")
        tensors = self._count(SMALLEST_TENSOR, "tensors")
        pairs = self._count(SMALLEST_PAIR, "entries of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text("a key", 1 << 16)
            if key in metadata:
                raise self._error(f"it has {key!r} twice")
            metadata[key] = self._value(key, self._take("I"))
        return GgufHeader((self._path,), metadata, self._tensors(tensors, self._alignment(metadata)))

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._text(f"the value of {key!r}")
        if kind in SCALARS:
            return self._take("B") != 0 if kind == BOOL else self._take(SCALARS[kind])
        if kind != ARRAY:
            raise self._error(f"the value of {key!r} has the unknown type {kind}")
        inner = self._take("I")
        if inner == STRING:
            return [self._text(f"an element of {key!r}") for _ in range(self._count(8, f"elements of {key!r}"))]
        if inner not in SCALARS:
            raise self._error(f"{key!r} is an array of the unknown type {inner}")
        form = "B" if inner == BOOL else SCALARS[inner]
        count = self._count(struct.calcsize("<" + form), f"elements of {key!r}")
        values = list(struct.unpack_from(f"<{count}{form}", self._content, self._at))
        self._at += count * struct.calcsize("<" + form)
        return values

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"its alignment {alignment!r} is not a power of two of 8 to {MAX_ALIGNMENT}")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        described = [self._tensor() for _ in range(count)]
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset, size in described:
            if name in tensors:
                raise self._error(f"it has the tensor {name!r} twice")
            if offset % alignment or begin + offset + size > len(self._content):
                raise self._error(
                    f"the {size} bytes of {name!r} at offset {offset} are "
                    + ("not aligned" if offset % alignment else "not all in the file, which may be truncated")
                )
            tensors[name] = GgufTensor(self._path, name, shape, kind, begin + offset, size)
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int, int]:
        name = self._text("a tensor's name", MAX_NAME)
        dims = self._take("I")
        if not 1 <= dims <= MAX_DIMS:
            raise self._error(f"{name!r} has {dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = tuple(reversed([self._take("Q") for _ in range(dims)]))
        number, offset = self._take("I"), self._take("Q")
        if not all(0 < size <= MAX_SIZE for size in shape) or math.prod(shape) > MAX_SIZE:
            raise self._error(f"{name!r} has the impossible shape {list(shape)}")
        if number not in TYPES:
            kind = OTHER_TYPES.get(number, f"number {number}")
            readable = ", ".join(kind for kind, _, _ in TYPES.values())
            raise StartError(f"{self._path}: {name!r} is of type {kind}, which is not supported; supported: {readable}")
        kind, elements, size = TYPES[number]
        if shape[-1] % elements:
            raise self._error(f"{name!r} has rows of {shape[-1]}, which are no whole blocks of {kind}")
        return name, shape, kind, offset, math.prod(shape) // elements * size
