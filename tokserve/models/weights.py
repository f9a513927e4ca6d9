"""From safetensors files to a model's parameters, one tensor at a time.

Three steps that know nothing of each other: `catalogue` and `stream` read files, `check` compares names and
shapes with what the model wants, `pour` hands tensors over.  A live update brings its own tensors and uses the
last two.  Nothing is unpickled, ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokserve import checkpoint, ops
from tokserve.errors import StartError
from tokserve.layers.parameter import Parameter, Scaled
from tokserve.models import float8

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HARMLESS = "rotary_emb.inv_freq"  # older checkpoints store what the rope table holds
LISTED = 10


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file; `key`: its name there; `dtype`: the file's name for it, if it is none of `FLOATS`.

    `scale`, `block`: what a float8 tensor is multiplied by (`float8.scaled`); `dtype` is then that of the result.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    scale: Entry | None = None
    block: float8.Block = (1, 1)


def catalogue(directory: Path, may_read: Callable[[Sequence[str]], object] = len) -> dict[str, Entry]:
    """Name -> entry for every tensor of the checkpoint; reads headers only.

    `may_read` hears the names of files before any of them is opened, and raises if one must not be.
    """
    may_read((SINGLE, INDEX))
    if (directory / SINGLE).is_file():
        return headers(directory / SINGLE)
    index = checkpoint.read_json(directory, INDEX)
    if index is None:
        raise StartError(f"{directory} holds no {SINGLE} and no {INDEX}{pickled(directory)}")
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise StartError(f"{INDEX} has no weight_map of names to files")
    files = sorted(set(places.values()))
    absent = [name for name in files if Path(name).name != name or not (directory / name).is_file()]
    if absent:
        raise StartError(f"{INDEX} names {len(absent)} files that are not there: {_listed(absent)}")
    may_read(files)
    found: dict[str, Entry] = {}
    for name in files:
        found |= headers(directory / name)
    lost = [name for name, place in places.items() if name not in found or found[name].file.name != place]
    if lost:
        raise StartError(f"{INDEX} names {len(lost)} tensors that are not in their file: {_listed(lost)}")
    return found


def pickled(directory: Path) -> str:
    """What an error about absent tensors adds if there are files that would have to be unpickled."""
    names = sorted(path.name for suffix in ("bin", "pt", "pth") for path in directory.glob(f"*.{suffix}"))
    return f" (only {', '.join(names[:3])}, which is not read: convert it to safetensors)" if names else ""


def headers(file: Path) -> dict[str, Entry]:
    """Name -> entry for every tensor of one file."""
    try:
        file.open("rb").close()  # of one that may not be read safe_open says that it is not there
        with safe_open(file, framework="pt") as opened:
            found = {}
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(key)
                dtype = view.get_dtype()
                found[key] = Entry(file, key, tuple(view.get_shape()), FLOATS.get(dtype, dtype))
            return found
    except SafetensorError as error:
        raise StartError(f"{file} is not a complete safetensors file: {error}") from error
    except OSError as error:
        raise StartError(f"{file} cannot be read: {error.strerror or error}") from error


def stamp(found: Mapping[str, Entry]) -> str:
    """Changes when a file of the catalogue is written again: of names, sizes and times, not of what is in them."""
    states = sorted(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in {e.file for e in found.values()}
    )
    return hashlib.sha256(repr(states).encode()).hexdigest()


def own_name(name: str, renames: Iterable[tuple[str, str]]) -> str | None:
    """The model's name for a checkpoint's tensor; None for one that is known to be of no use."""
    if name.endswith(HARMLESS):
        return None
    return next((new + name.removeprefix(old) for old, new in renames if name.startswith(old)), name)


def own_names(found: Mapping[str, Entry], renames: Iterable[tuple[str, str]]) -> dict[str, Entry]:
    """The catalogue under the model's names."""
    named: dict[str, Entry] = {}
    for name, entry in found.items():
        own = own_name(name, renames)
        if own in named:
            raise StartError(f"{entry.file.parent} holds {own} twice, as {named[own].key} and {entry.key}")
        if own is not None:
            named[own] = entry
    return named


def with_scales(found: Mapping[str, Entry], block: float8.Block) -> dict[str, Entry]:
    """The catalogue of a float8 checkpoint with each scale beside its tensor.

    A float8 tensor whose scale is missing or misshapen stays as it is, so that `check` names both.
    """
    joined = {name: entry for name, entry in found.items() if not float8.is_unused(name)}
    for name, entry in found.items():
        if entry.dtype != float8.STORED or len(entry.shape) != 2:
            continue
        for scale in (name + ending for ending in float8.SCALES):
            beside = joined.get(scale)
            if beside is None or beside.dtype not in FLOATS.values():
                continue
            if beside.shape in float8.scale_shapes(entry.shape, block):
                joined[name] = replace(entry, dtype=torch.float32, scale=joined.pop(scale), block=block)
                break
    return joined


def understood(found: dict[str, Entry], hf: Mapping[str, Any]) -> dict[str, Entry]:
    """The catalogue as config.json says it is to be read: with scales, if it says that there are float8 tensors."""
    block = float8.block_of(hf)
    return found if block is None else with_scales(found, block)


def is_float8(found: Mapping[str, Entry]) -> bool:
    """Whether all matrices of the layers are float8 with scales that float8 products take as they are.

    Those of one width, which may be one layer's, have as many groups then.
    """
    groups: dict[int, set[int]] = {}
    for name, entry in found.items():
        if ".layers." in name and len(entry.shape) == 2:
            if entry.scale is None:
                return False
            count = float8.groups(entry.shape, entry.scale.shape)
            if count > 1 and entry.block[1] % ops.FLOAT8_STEP:
                return False
            groups.setdefault(entry.shape[1], set()).add(count)
    return bool(groups) and all(len(counts) == 1 for counts in groups.values())


def equal(one: Entry, other: Entry) -> bool:
    """Whether two stored tensors are the same."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(read(one), read(other))


def read(entry: Entry) -> Tensor:
    """The tensor, of a float8 one what it means; it may be a view of the mapped file."""
    tensor = stored(entry)
    return tensor.dense() if isinstance(tensor, Scaled) else tensor


def stored(entry: Entry) -> Tensor | Scaled:
    """The tensor as it is stored; it may be a view of the mapped file.

    The file is opened for it alone, so that no more of it than that tensor is counted as our memory.
    """
    with safe_open(entry.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(entry.key)
    return tensor if entry.scale is None else float8.scaled(tensor, read(entry.scale), entry.block)


def stream(found: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor | Scaled]]:
    """(name, tensor) of all entries, file by file.  A tensor may be a view of the mapped file: copy, do not keep."""
    for name, entry in sorted(found.items(), key=lambda item: item[1].file):
        yield name, stored(entry)


def check(found: Mapping[str, Entry | Tensor], wanted: Mapping[str, Parameter], source: str) -> None:
    """Raise one StartError that lists missing, unexpected, misshapen and non-floating tensors, if any.

    `source` says whose tensors they are.
    """
    if problems := misfits(found, wanted):
        raise StartError(f"the tensors of {source} do not fit the model: {'; '.join(problems)}")


def misfits(
    found: Mapping[str, Entry | Tensor], wanted: Mapping[str, Parameter], *, complete: bool = True
) -> list[str]:
    """What is wrong with `found`, kind by kind; `complete` False: some may still be missing."""
    missing = [name for name in wanted if name not in found] if complete else []
    unexpected = [name for name in found if name not in wanted]
    shared = [(name, entry, wanted[name].shape) for name, entry in found.items() if name in wanted]
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


def pour(tensors: Iterable[tuple[str, Tensor | Scaled]], wanted: Mapping[str, Parameter]) -> None:
    """Load each tensor into the parameter of its name."""
    for name, tensor in tensors:
        wanted[name].take(tensor)


def _listed(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
