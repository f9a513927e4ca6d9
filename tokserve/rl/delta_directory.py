"""A directory with a file a version, which a trainer writes and any number of servers read.

`000003.delta.safetensors` leads from one version to the next, `000003.full.safetensors` holds all tensors of a version:
an anchor.  Metadata says which versions; the numbers are only for people, and for what is the newest.  A file appears
under its name when it is complete, and never changes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from .deltas import FORMAT, FULL_FORMAT, DeltaLabel, file_pieces
from .errors import WeightsConflict, WeightsError

NAME = re.compile(r"(\d{1,12})\.(full|delta)\.safetensors")
MAX_HEADER = 64 << 20
Identity = tuple[str, str]  # version and checksum


class FileMetadata(msgspec.Struct):
    """The metadata of a file of such a directory."""

    format: str
    version: str
    checksum: str
    base_version: str | None = None
    base_checksum: str | None = None


class _Header(msgspec.Struct):
    metadata: FileMetadata = msgspec.field(name="__metadata__")


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A file and the weights that it leads to; `base`: from which, None: it is an anchor."""

    path: Path
    number: int
    identity: Identity
    base: Identity | None


def is_chain(directory: Path) -> bool:
    """Whether a directory has files of this kind."""
    return any(NAME.fullmatch(name) for name in os.listdir(directory))


def files_of(directory: Path, may_read: Callable[[Sequence[str]], object] = len) -> list[VersionFile]:
    """The files of a directory, by number; `may_read` is called with their names first.  Raises WeightsError."""
    names = sorted(name for name in os.listdir(directory) if NAME.fullmatch(name))
    may_read(names)
    return sorted((described(directory / name) for name in names), key=lambda file: (file.number, file.base is None))


def described(path: Path) -> VersionFile:
    """A file by its metadata.  Raises WeightsError."""
    match = NAME.fullmatch(path.name)
    if match is None:
        raise WeightsError(f"{path.name} is not the name of a file of weights by versions")
    number, kind = match.groups()
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= MAX_HEADER:
                raise WeightsError(f"{path.name} is not a safetensors file")
            metadata = msgspec.json.decode(file.read(size), type=_Header).metadata
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{path.name} cannot be read as a file of weights: {error}") from None
    base = None
    if kind == "delta" and metadata.base_version is not None and metadata.base_checksum is not None:
        base = metadata.base_version, metadata.base_checksum
    if metadata.format != (FULL_FORMAT if kind == "full" else FORMAT) or (kind == "delta" and base is None):
        raise WeightsError(f"{path.name} is not of the format that its name says")
    return VersionFile(path, int(number), (metadata.version, metadata.checksum), base)


def chain(files: Sequence[VersionFile], version: str | None, have: Identity | None) -> list[VersionFile]:
    """The files that lead to `version` (None: the newest), in order: deltas from the weights `have`, if there is a way,
    else an anchor and the deltas after it.  No files: `have` is that version.  Raises WeightsError, WeightsConflict.
    """
    targets = [file for file in files if version is None or file.identity[0] == version]
    if not targets:
        raise WeightsError(f"the directory has no file of version {version!r}" if files else "the directory is empty")
    target = targets[-1].identity
    if len({file.identity for file in targets}) > 1 and version is not None:
        raise WeightsConflict(f"the directory has different weights of version {version!r}")
    deltas: dict[Identity, VersionFile] = {}
    for file in files:
        if file.base is not None:
            deltas.setdefault(file.identity, file)  # the first needs no later one, so that no way is a circle
    anchors = {file.identity: file for file in files if file.base is None}
    way = list(_chain_to(deltas, target))
    if have is not None and (have == target or have in [file.base for file in way]):
        length = [target, *(file.base for file in way)].index(have)
        return way[:length][::-1]
    for length, identity in enumerate([target, *(file.base for file in way)]):
        if identity in anchors:
            return [anchors[identity], *way[:length][::-1]]
    lost = (way[-1].base if way else None) or target
    raise WeightsConflict(
        f"no chain leads to version {target[0]!r}: the directory has neither a full file nor a delta that makes "
        f"version {lost[0]!r}, and this server has other weights; write a full file"
    )


def _chain_to(deltas: Mapping[Identity, VersionFile], target: Identity) -> Iterator[VersionFile]:
    """The deltas that lead to `target`, from the last one on."""
    seen = set()
    current: Identity | None = target
    while current is not None and current in deltas and current not in seen:
        seen.add(current)
        yield deltas[current]
        current = deltas[current].base


class WeightDirectory:
    """The writer's end: a delta a version, and a full file with the first version and every `anchor_every`-th."""

    def __init__(self, directory: str | Path, anchor_every: int = 10) -> None:
        if anchor_every < 1:
            raise ValueError("anchor_every must be at least 1")
        self.path = Path(directory).resolve()
        self.path.mkdir(parents=True, exist_ok=True)
        self.anchor_every = anchor_every
        files = files_of(self.path)
        self._next = files[-1].number + 1 if files else 0
        self._anchor = max((file.number for file in files if file.base is None), default=None)

    @property
    def needs_anchor(self) -> bool:
        """Whether a full file goes with the next version."""
        return self._anchor is None or self._next - self._anchor >= self.anchor_every

    def write(
        self,
        identity: Identity,
        full: Mapping[str, Tensor] | None,
        delta: tuple[DeltaLabel, Mapping[str, Tensor]] | None,
    ) -> int:
        """Write a version: its delta, its full file, or both; returns the bytes written."""
        number, written = self._next, 0
        if full is not None:
            metadata = {"format": FULL_FORMAT, "version": identity[0], "checksum": identity[1]}
            written += self._write(f"{number:06d}.full.safetensors", full, metadata)
            self._anchor = number
        if delta is not None:
            label, tensors = delta
            written += self._write(f"{number:06d}.delta.safetensors", tensors, label.metadata())
        self._next += 1
        return written

    def _write(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
        partial = self.path / f".{name}.{os.getpid()}"
        try:
            with partial.open("wb") as file:
                for piece in file_pieces(tensors, metadata):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            partial.rename(self.path / name)
        finally:
            partial.unlink(missing_ok=True)  # it has its name, or the disk is full
        return size

    def prune(self, keep: int = 1) -> list[str]:
        """Delete the files before the `keep`-th anchor from the end; returns their names.  Never done unasked."""
        anchors = sorted(file.number for file in files_of(self.path) if file.base is None)
        if keep < 1 or len(anchors) < keep:
            return []
        old = [file for file in files_of(self.path) if file.number < anchors[-keep]]
        for file in old:
            file.path.unlink()
        return [file.path.name for file in old]
