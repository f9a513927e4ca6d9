"""Where the changes of a delta come from: a process group, this machine's memory, or files that many servers read.

A safetensors body goes to `DeltaStaging` as it comes.  Each of these checks what is said before memory is taken for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokserve.base.errors import RequestError
from tokserve.features.lora.pushed_adapter import AdapterStaging
from tokserve.features.weights.delta_staging import DeltaStaging
from tokserve.features.weights.local_memory import local_tensors
from tokserve.features.weights.staging import Staging
from tokserve.features.weights.weight_sources import Announcement, SafetensorsStream
from tokserve.models import formats
from tokserve.rl import deltas
from tokserve.rl.broadcast import DTYPES, TransferGroup, receive_tensors
from tokserve.rl.delta_directory import VersionFile
from tokserve.rl.deltas import DeltaReader, Deltas, TensorDelta, applied, merged
from tokserve.rl.errors import WeightsError
from tokserve.rl.sums import set_checksum, tensor_sum

FILE_DTYPES = formats.DTYPES | {"U8": torch.uint8, "U16": torch.uint16}  # in safetensors
STEP_NAMES = {"uint8": torch.uint8, "uint16": torch.uint16}
READ_BYTES = 4 << 20


def from_local_memory(staging: DeltaStaging | Staging | AdapterStaging, announced: Announcement) -> None:
    """The tensors of a delta's file, in a segment or in memory of a GPU."""
    declared = announced.declared(DTYPES | STEP_NAMES)
    staging.announce((name, shape, dtype) for name, dtype, shape in declared)
    with local_tensors(announced, declared, torch.device("cpu")) as tensors:
        for name, tensor in tensors:
            staging.push(name, tensor.clone())


def from_group(staging: DeltaStaging, announced: Announcement, group: TransferGroup) -> None:
    """Receive each tensor's indices and new elements, in the order of the names; none where none change."""
    declared, counts = announced.declared(), announced.counts()
    described = staging.coordinates.described
    for (name, dtype, shape), count in zip(declared, counts, strict=True):
        if described.get(name) != (dtype, shape):
            raise RequestError(
                f"{name} of {deltas.dtype_name(dtype)} {list(shape)} is none of this server's tensors; "
                "/weight_info?tensors=true lists them",
                field="update_info.names",
            )
        if count > math.prod(shape):
            raise RequestError(f"{name} has fewer than {count} elements", field="update_info.num_updates_list")
    for (name, dtype, shape), count in zip(declared, counts, strict=True):
        if count:
            pair = [("indices", deltas.index_dtype(shape), (count,)), ("values", dtype, (count,))]
            indices, values = (tensor.cpu() for _, tensor in receive_tensors(group, pair, packed=False))
            ascend = bool((indices[1:] > indices[:-1]).all())
            if not ascend or int(indices[0]) < 0 or int(indices[-1]) >= math.prod(shape):
                raise RequestError(f"the indices of {name} must ascend, and lie within its {math.prod(shape)} elements")
            staging.add(name, TensorDelta(indices.numpy(), values))


def stream_into(path: Path, stream: SafetensorsStream) -> None:
    """Read a file.  Raises RequestError, OSError."""
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            stream.feed(piece)
    stream.end()


def changes_in(files: Sequence[VersionFile], described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Deltas:
    """The changes of several deltas, one after the other, as one."""
    total: Deltas = {}
    for file in files:
        for name, delta in _changes(file, described).items():
            total[name] = merged(total.get(name), delta)
    return total


def _changes(file: VersionFile, described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Deltas:
    reader, changes = DeltaReader(described), Deltas()

    def put(name: str, tensor: Tensor) -> None:
        complete = reader.put(name, tensor)
        if complete is not None:
            changes[complete[0]] = complete[1]

    try:
        stream_into(file.path, SafetensorsStream(reader.announce, put, dtypes=FILE_DTYPES))
    except (RequestError, WeightsError) as error:
        raise RequestError(f"{file.path.name}: {error.message}") from None
    return changes


def from_files(staging: DeltaStaging, files: Sequence[VersionFile]) -> None:
    """A chain of deltas on the weights that serve."""
    for name, delta in changes_in(files, staging.coordinates.described).items():
        staging.add(name, delta)


def full_from_files(staging: Staging, files: Sequence[VersionFile]) -> None:
    """All tensors of an anchor, changed by the deltas after it, whose checksum is compared."""
    anchor, *others = files
    described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    changes: Deltas = {}
    sums: dict[str, int] = {}

    def announce(tensors: list[tuple[str, tuple[int, ...], Any]]) -> None:
        staging.announce(tensors)
        described.update({name: (dtype, shape) for name, shape, dtype in tensors})
        changes.update(changes_in(others, described))

    def put(name: str, tensor: Tensor) -> None:
        tensor = applied(changes.pop(name, None), tensor)
        sums[name] = tensor_sum(tensor)
        staging.push(name, tensor)

    try:
        stream_into(anchor.path, SafetensorsStream(announce, put))
    except (RequestError, WeightsError) as error:
        raise RequestError(f"{anchor.path.name}: {error.message}", field=error.field, code=error.code) from None
    if (checksum := set_checksum(sums, described)) != files[-1].identity[1]:
        raise RequestError(
            f"the weights of version {files[-1].identity[0]!r} have the checksum {checksum}, not "
            f"{files[-1].identity[1]} as the files say: one of them was changed; write a full file",
            code="checksum_mismatch",
        )
