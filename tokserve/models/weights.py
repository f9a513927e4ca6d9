"""From safetensors files to a model's parameters, one tensor at a time.

Three independent steps: `catalogue` and `stream` read files, `check` compares names and shapes with the model's
parameters, `load_into` hands tensors over.  A live update brings its own tensors and uses the last two.  Nothing is
unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokserve import checkpoint
from tokserve.base.errors import RequestError, StartError
from tokserve.base.rooms import imported
from tokserve.layers.parameter import Parameter, StackedParameter, StoredWeight, as_dense
from tokserve.models.formats import DENSE, FLOATS, CheckpointFormat, group

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHERS = ("consolidated", "adapter")  # beginnings of the names of files that hold the weights again, or others
IGNORED = "rotary_emb.inv_freq"  # older checkpoints store what the rope table holds
HEAD = "lm_head.weight"
HEADLESS = """ (if the output head is the embedding: --hf-overrides '{"tie_word_embeddings": true}')"""
LISTED = 10
MAX_NAMED = 100  # tensors that are not finite
LFS_POINTER = b"version https://git-lfs.github.com/"
SMALL = 256 << 10  # bytes: to read so many takes no longer than to map them


class Source(Protocol):
    """Where a tensor lies in a file that is no safetensors file.  `key`: its name there; `kind`: its type, for people;
    `is_plain`: it is a tensor of floats."""

    @property
    def kind(self) -> str: ...

    @property
    def file(self) -> Path: ...

    @property
    def key(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_plain(self) -> bool: ...

    def read(self) -> Tensor | StoredWeight:
        """The weight, as it is stored."""

    def raw(self) -> Tensor:
        """The bytes of a weight that is not plain, [N, bytes of a row]."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file; `key`: its name there; `dtype`: the file's name for it, if it is none of `FLOATS`.

    `parts`: by role, the tensors that form a weight in `format`; shape and dtype are then the weight's, file and key
    those of one part.  `source`: where it lies, if that is no safetensors file.  `offset`: of its first byte in another
    file, if that is known.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    parts: Mapping[str, Entry] = field(default_factory=dict)
    format: CheckpointFormat = DENSE
    offset: int | None = None
    source: Source | None = None

    @property
    def is_stored(self) -> bool:
        """Whether it is in a form that is not a tensor of floats."""
        return bool(self.parts) or (self.source is not None and not self.source.is_plain)


def catalogue(directory: Path, may_read: Callable[[Sequence[str]], object] = len) -> dict[str, Entry]:
    """Name -> entry for every tensor of the checkpoint; reads headers only.  `may_read` is called with the names of
    files before any of them is opened, and raises if one must not be."""
    for kind in checkpoint.model_files():
        if shards := kind.files(directory):
            return {
                name: Entry(source.file, source.key, source.shape, torch.float32, source=source)
                for name, source in imported(kind.sources)(shards).items()
            }
    may_read((SINGLE, INDEX))
    if (directory / SINGLE).is_file():
        return headers(directory / SINGLE)
    index = checkpoint.read_json(directory, INDEX)
    if index is None:
        return _without_index(directory, may_read)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StartError(f"{INDEX} has no weight_map of names to files")
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if Path(name).name != name or not (directory / name).is_file()]
    if absent:
        raise StartError(f"{INDEX} names {len(absent)} files that are not there: {_listed(absent)}")
    may_read(files)
    entries: dict[str, Entry] = {}
    for name in files:
        entries |= headers(directory / name)
    lost = [name for name, file in weight_map.items() if name not in entries or entries[name].file.name != file]
    if lost:
        raise StartError(f"{INDEX} names {len(lost)} tensors that are not in their file: {_listed(lost)}")
    return entries


def _without_index(directory: Path, may_read: Callable[[Sequence[str]], object]) -> dict[str, Entry]:
    """The tensors of all files of a checkpoint that says nothing of where they are."""
    files = sorted(path.name for path in directory.glob("*.safetensors") if not path.name.startswith(OTHERS))
    if not files:
        raise StartError(f"{directory} holds no {SINGLE} and no {INDEX}{pickled(directory)}")
    may_read(files)
    entries: dict[str, Entry] = {}
    for name in files:
        held = headers(directory / name)
        if twice := entries.keys() & held:
            raise StartError(f"{directory} holds no {INDEX}, and several files have {_listed(sorted(twice))}")
        entries |= held
    return entries


def pickled(directory: Path) -> str:
    """What an error about absent tensors adds if there are files that would have to be unpickled."""
    names = sorted(path.name for suffix in ("bin", "pt", "pth") for path in directory.glob(f"*.{suffix}"))
    return f" (only {', '.join(names[:3])}, which is not read: convert it to safetensors)" if names else ""


def headers(file: Path) -> dict[str, Entry]:
    """Name -> entry for every tensor of one file."""
    try:
        file.open("rb").close()  # safe_open reports a file without read permission as missing
        with safe_open(file, framework="pt") as opened:
            entries, offsets = {}, _offsets(file)
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(key)
                dtype = view.get_dtype()
                entries[key] = Entry(
                    file, key, tuple(view.get_shape()), FLOATS.get(dtype, dtype), offset=offsets.get(key)
                )
            return entries
    except SafetensorError as error:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
        if is_pointer:
            raise StartError(f"{file} is a pointer of Git LFS, not the file: fetch that with `git lfs pull`") from None
        raise StartError(f"{file} is not a complete safetensors file: {error}") from error
    except OSError as error:
        raise StartError(f"{file} cannot be read: {error.strerror or error}") from error


def _offsets(file: Path) -> dict[str, int]:
    """Where the tensors of a safetensors file, which safe_open has checked, begin."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def stamp(entries: Mapping[str, Entry]) -> str:
    """A digest of the names, sizes and times of a catalogue's files: it changes when one is written again."""
    states = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in {e.file for e in entries.values()}
    )
    return hashlib.sha256(repr(states).encode()).hexdigest()


def model_name(name: str, renames: Iterable[tuple[str, str]]) -> str | None:
    """The model's name for a checkpoint's tensor; None for one that no model takes."""
    if name.endswith(IGNORED):
        return None
    renames = tuple(renames)
    if any(not new and name.startswith(old) for old, new in renames):
        return None
    name = next((new + name.removeprefix(old) for old, new in renames if name.startswith(old)), name)
    for old, new in renames:
        if old.startswith("."):
            name = name.replace(old, new)
    return name


def with_model_names(entries: Mapping[str, Entry], renames: Iterable[tuple[str, str]]) -> dict[str, Entry]:
    """The catalogue under the model's names."""
    named: dict[str, Entry] = {}
    for name, entry in entries.items():
        target = model_name(name, renames)
        if target in named:
            raise StartError(f"{entry.file.parent} holds {target} twice, as {named[target].key} and {entry.key}")
        if target is not None:
            named[target] = entry
    return named


def by_weight(entries: Mapping[str, Entry], checkpoint_format: CheckpointFormat) -> dict[str, Entry]:
    """The catalogue with one entry per weight."""
    weights: dict[str, Entry] = {}
    for weight, names in group(checkpoint_format, entries).items():
        parts = {role: entries[name] for role, name in names.items()}
        first = next(iter(parts.values()))
        if len(parts) > 1:
            first = Entry(first.file, weight, checkpoint_format.shape(parts), torch.float32, parts, checkpoint_format)
        weights[weight] = first
    return weights


def without_zero_biases(entries: Mapping[str, Entry], parameters: Mapping[str, Parameter]) -> dict[str, Entry]:
    """The entries without biases of quantized layers that the model does not have and that are zero: AutoGPTQ adds
    them."""
    return {
        name: entry
        for name, entry in entries.items()
        if name in parameters
        or not name.endswith(".bias")
        or not entries.get(name.removesuffix("bias") + "weight", entry).parts
        or bool(read_tensor(entry).any())
    }


def equal(one: Entry, other: Entry) -> bool:
    """Whether two stored tensors are the same."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(read_tensor(one), read_tensor(other))


def read_tensor(entry: Entry) -> Tensor:
    """What the entry means as a tensor of floats."""
    return as_dense(stored(entry))


def stored(entry: Entry, *, mapped: bool = False) -> Tensor | StoredWeight:
    """The weight as it is stored, read from its file.

    `mapped`: it may be a view of the file, which is mapped for it alone, so that no more of it than that tensor is
    counted as our memory.  A file that becomes shorter while it is mapped ends the process.
    """
    if entry.source is not None:
        return entry.source.read()
    if entry.parts:
        return entry.format.assemble({role: _tensor(part, mapped) for role, part in entry.parts.items()})
    return _tensor(entry, mapped)


def _tensor(entry: Entry, mapped: bool) -> Tensor:
    if entry.offset is not None and isinstance(entry.dtype, torch.dtype):
        size = math.prod(entry.shape) * entry.dtype.itemsize
        if size > 0:
            aligned = entry.offset % entry.dtype.itemsize == 0
            raw = _mapped(entry, size) if mapped and aligned and size > SMALL else _read(entry, size)
            return raw.view(entry.dtype).view(entry.shape)
    with safe_open(entry.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(entry.key)
    return tensor


def _read(entry: Entry, size: int) -> Tensor:
    raw = np.fromfile(entry.file, np.uint8, size, offset=entry.offset or 0)
    if len(raw) < size:
        raise StartError(f"{entry.file} ends within {entry.key}")
    return torch.from_numpy(raw)


def _mapped(entry: Entry, size: int) -> Tensor:
    """The bytes as a view of the file, which the system begins to read."""
    offset = entry.offset or 0
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    with entry.file.open("rb") as file:
        try:
            view = mmap.mmap(file.fileno(), skipped + size, access=mmap.ACCESS_COPY, offset=offset - skipped)
        except ValueError:
            raise StartError(f"{entry.file} ends within {entry.key}") from None
    if hasattr(view, "madvise"):
        view.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(view, dtype=torch.uint8, count=size, offset=skipped)


def source(entry: Entry) -> Tensor:
    """A stored tensor as it is in its file: of a GGUF file's blocks, the bytes [N, bytes of a row]."""
    if entry.source is not None and not entry.source.is_plain:
        return entry.source.raw()
    return read_tensor(entry)


def stream(entries: Mapping[str, Entry], *, mapped: bool = False) -> Iterator[tuple[str, Tensor | StoredWeight]]:
    """(name, weight) of all entries, file by file, each from where it is in the file on.  With `mapped`, a weight may
    be a view of the file: copy, do not keep."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[1].offset or 0)):
        yield name, stored(entry, mapped=mapped)


def check_names(entries: Mapping[str, Entry | Tensor], parameters: Mapping[str, Parameter], source: str) -> None:
    """Raise one StartError that lists missing, unexpected, misshapen and non-floating tensors, if any.  `source` says
    whose tensors they are."""
    if problems := mismatches(entries, parameters):
        hint = HEADLESS if HEAD in parameters and HEAD not in entries else ""
        raise StartError(f"the tensors of {source} do not fit the model: {'; '.join(problems)}{hint}")


def layout(
    names: Collection[str], parameters: Mapping[str, Parameter], stacked: Mapping[str, StackedParameter]
) -> dict[str, Parameter]:
    """The parameters that tensors of these names load: a stacked one in place of those that it covers."""
    present = {name: one for name, one in stacked.items() if name in names}
    covered = {name for one in present.values() for name in one.covers}
    kept = {name: parameter for name, parameter in parameters.items() if name not in covered}
    return kept | {name: one.parameter for name, one in present.items()}


def mismatches(
    entries: Mapping[str, Entry | Tensor], parameters: Mapping[str, Parameter], *, complete: bool = True
) -> list[str]:
    """The problems of `entries`, kind by kind; `complete` False: some may still be missing."""
    missing = [name for name in parameters if name not in entries] if complete else []
    unexpected = [name for name in entries if name not in parameters]
    shared = [(name, entry, parameters[name].shape) for name, entry in entries.items() if name in parameters]
    misshapen = [
        f"{name} (expected {list(shape)}, found {list(entry.shape)})"
        for name, entry, shape in shared
        if tuple(entry.shape) != shape
    ]
    mistyped = [f"{name} ({entry.dtype})" for name, entry, _ in shared if entry.dtype not in FLOATS.values()]
    kinds = (
        ("missing", missing),
        ("unexpected", unexpected),
        ("misshapen", misshapen),
        ("of an unsupported dtype", mistyped),
    )
    return [counted(kind, names) for kind, names in kinds if names]


def counted(kind: str, names: list[str]) -> str:
    """How many there are of a kind, and the first names."""
    return f"{len(names)} {kind}: {_listed(names)}"


def not_finite(names: Sequence[str], dtype: torch.dtype) -> RequestError:
    """The error of pushed tensors that are not finite in `dtype`; it names them, up to a bound."""
    verb = "is" if len(names) == 1 else "are"
    return RequestError(
        f"{_listed(names, MAX_NAMED)} {verb} not finite in {str(dtype).removeprefix('torch.')} (--check-weights)",
        code="weights_not_finite",
    )


def admit_any(size: int) -> None:
    """Admit weights of any size, where it is not known how much room there is."""


def least_bytes(parameters: Mapping[str, Parameter], stored: Collection[str] = ()) -> int:
    """Bytes that the parameters take at least on this rank.  `stored`: names of weights that may stay as they are
    stored.  Bytes of quantized weights stand for two of four bits, and scales are left out."""
    total = 0.0
    for name, parameter in parameters.items():
        may_stay = name in stored and parameter.load_stored is not None
        bits = 4 if may_stay or parameter.dtype == torch.uint8 else 8 * parameter.dtype.itemsize
        total += math.prod(parameter.shape) * parameter.share * bits / 8
    return int(total)


def load_into(parameters: Mapping[str, Parameter], weights: Iterable[tuple[str, Tensor | StoredWeight]]) -> None:
    for name, weight in weights:
        parameters[name].take(weight)


def _listed(names: Sequence[str], limit: int = LISTED) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
