"""The delta format: the elements of a set of weights that differ from another set's, as a safetensors file.

A changed tensor NAME is stored whole under its name, or as `NAME#values`, the new elements, and `NAME#steps`, their
places.  A step is an unsigned integer of 8 or 16 bits: how far the next changed element lies from the last one (the
first: from place -1); 0 means the largest step, at which nothing changes.  Places thus ascend whatever the bytes are.
What did not change is absent.  docs/rl.md specifies the format for other writers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import WeightsError
from .native import native
from .sums import Bits, Indices, bits_of, change

FORMAT = "tokserve-delta-1"
FULL_FORMAT = "tokserve-full-1"  # of a file that a chain of deltas begins with
STEPS, VALUES = "#steps", "#values"
STEP_DTYPES = {torch.uint8: 255, torch.uint16: 65535}  # with the largest step
SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",  # of parts of quantized weights
}
DENSE_FROM = 0.25  # the share of changed elements from which a tensor is stored whole
PIECE = 1 << 20  # bytes of a file that are made at a time, and elements that are compared
COMPARED = {torch.float32, torch.bfloat16, torch.float16}  # by the extension


@dataclass(frozen=True, slots=True)
class DeltaLabel:
    """Which set of weights a delta changes, and into which; `checksum`s are those of `sums.set_checksum`.  `checksum`
    "": of a part of a delta, which was made before the others were known."""

    base_version: str
    base_checksum: str
    version: str
    checksum: str

    def metadata(self) -> dict[str, str]:
        """The metadata of the file."""
        return {
            "format": FORMAT,
            "base_version": self.base_version,
            "base_checksum": self.base_checksum,
            "version": self.version,
        } | ({"checksum": self.checksum} if self.checksum else {})


def label_of(metadata: Mapping[str, Any]) -> DeltaLabel:
    """The label in a file's metadata.  Raises WeightsError."""
    names = ("base_version", "base_checksum", "version")
    if metadata.get("format") != FORMAT:
        raise WeightsError(f"the file is not a delta: its metadata has no format {FORMAT!r}", code="not_a_delta")
    if absent := [name for name in names if not isinstance(metadata.get(name), str)]:
        raise WeightsError(f"the delta's metadata has no {' and no '.join(absent)}", code="not_a_delta")
    checksum = metadata.get("checksum", "")
    if not isinstance(checksum, str):
        raise WeightsError("the checksum in the delta's metadata is not a text", code="not_a_delta")
    return DeltaLabel(metadata["base_version"], metadata["base_checksum"], metadata["version"], checksum)


@dataclass(slots=True)
class TensorDelta:
    """The changed elements of one tensor: `values` at the flat, ascending `indices`; None: all of them, in order."""

    indices: Indices | None
    values: Tensor

    @property
    def num_changed(self) -> int:
        return self.values.numel()


Deltas = dict[str, TensorDelta]


def index_dtype(shape: Sequence[int]) -> torch.dtype:
    """The dtype of flat indices into a tensor of this shape on their way over a process group."""
    return torch.int32 if math.prod(shape) <= 1 << 31 else torch.int64


def encode_steps(indices: Indices) -> NDArray[Any]:
    """Ascending places as steps, of the width that takes fewer bytes."""
    signed = indices.astype(np.int64, copy=False)
    if native is not None:
        wide, *escapes = native.count_escapes(signed)
        narrow = not len(signed) or wide * 4 < len(signed)
        steps = np.empty(len(signed) + escapes[not narrow], np.uint8 if narrow else np.uint16)
        native.encode_steps(signed, steps)
        return steps
    gaps = signed.copy()
    gaps[:1] += 1
    gaps[1:] -= signed[:-1]
    narrow = not len(gaps) or np.count_nonzero(gaps > 255) * 4 < len(gaps)
    return _with_escapes(gaps, 255, np.uint8) if narrow else _with_escapes(gaps, 65535, np.uint16)


def _with_escapes(gaps: NDArray[np.int64], limit: int, dtype: Any) -> NDArray[Any]:
    """Steps of `dtype`, with an escape for each `limit` that a gap exceeds; `gaps` is overwritten."""
    large = np.flatnonzero(gaps > limit)
    escapes = (gaps[large] - 1) // limit
    gaps[large] -= escapes * limit
    return np.insert(gaps.astype(dtype), np.repeat(large, escapes), 0)


def decode_steps(steps: NDArray[Any], count: int, size: int) -> Indices:
    """Places of `count` elements in a tensor of `size`.  Raises WeightsError if the steps do not say them."""
    if len(steps) and steps[-1] == 0:
        raise WeightsError("the steps end with an escape")
    if native is not None:
        indices = np.empty(count, np.int64)
        num_places, last = native.decode_steps(steps, indices)
    else:
        indices = _places(steps)
        num_places, last = len(indices), indices[-1] if len(indices) else -1
    if num_places != count:
        raise WeightsError(f"there are {count} values and places for {num_places}")
    if last >= size:
        raise WeightsError(f"place {last} lies outside of the tensor's {size} elements")
    return indices


def _places(steps: NDArray[Any]) -> NDArray[np.int64]:
    escapes = steps == 0
    if escapes.any():
        steps = np.where(escapes, np.iinfo(steps.dtype).max, steps)
    return np.cumsum(steps, dtype=np.int64)[~escapes] - 1


def max_steps(count: int, size: int, dtype: torch.dtype) -> int:
    """How many steps `count` places in a tensor of `size` can need."""
    return count + size // STEP_DTYPES[dtype]


def tensors_of(deltas: Deltas) -> dict[str, Tensor]:
    """The tensors of the file."""
    tensors: dict[str, Tensor] = {}
    for name, delta in deltas.items():
        if delta.indices is not None:
            tensors[name + STEPS] = torch.from_numpy(encode_steps(delta.indices))
            tensors[name + VALUES] = delta.values
        else:
            tensors[name] = delta.values
    return tensors


def merged(first: TensorDelta | None, then: TensorDelta) -> TensorDelta:
    """The changes of one delta and of the next as one."""
    if first is None or then.indices is None:
        return then
    if first.indices is None:
        values = first.values.clone()
        values.view(-1)[torch.from_numpy(then.indices.astype(np.int64))] = then.values
        return TensorDelta(None, values)
    indices, places = np.unique(np.concatenate([then.indices, first.indices]), return_index=True)
    return TensorDelta(indices, torch.cat([then.values, first.values])[torch.from_numpy(places)])


def applied(delta: TensorDelta | None, tensor: Tensor) -> Tensor:
    """A contiguous tensor with the changes; itself, changed, or the delta's."""
    if delta is None:
        return tensor
    if delta.indices is None:
        return delta.values
    tensor.view(-1)[torch.from_numpy(delta.indices.astype(np.int64))] = delta.values
    return tensor


def are_equal(one: TensorDelta | None, other: TensorDelta | None) -> bool:
    """Whether they change a tensor alike, bit by bit; None: they do not change it."""
    if one is None or other is None:
        return one is other
    same_places = (one.indices is None) == (other.indices is None)
    if same_places and one.indices is not None and other.indices is not None:
        same_places = np.array_equal(one.indices, other.indices)
    return same_places and np.array_equal(bits_of(one.values), bits_of(other.values))


@dataclass(slots=True)
class DeltaReader:
    """Puts the parts of a file together again, tensor by tensor.  `described`: dtype and shape of the tensors that may
    change.  Every problem is a WeightsError, and is found before memory is taken for what a header says."""

    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    _announced: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=dict)
    _parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def announce(self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype | str]]) -> None:
        """The names, shapes and dtypes of a file's tensors."""
        parts: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        for key, shape, dtype in tensors:
            name, role = _split(key)
            if name not in self.described:
                raise WeightsError(f"the model has no tensor {name}")
            if name in self._announced or role in parts.get(name, {}):
                raise WeightsError(f"{name} comes twice")
            if not isinstance(dtype, torch.dtype):
                raise WeightsError(f"{key} is of the unsupported dtype {dtype}")
            parts.setdefault(name, {})[role] = tuple(shape), dtype
        for name, roles in parts.items():
            self._check(name, roles)
        self._announced |= parts

    def _check(self, name: str, roles: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        dtype, shape = self.described[name]
        if roles.keys() not in ({""}, {STEPS, VALUES}):
            raise WeightsError(f"{name} must come whole, or with {STEPS} and {VALUES}")
        values_shape, values_dtype = roles.get("") or roles[VALUES]
        if values_dtype != dtype:
            raise WeightsError(f"the elements of {name} must be {dtype_name(dtype)}, not {dtype_name(values_dtype)}")
        if "" in roles:
            if values_shape != shape:
                raise WeightsError(f"{name} must have the shape {list(shape)}, not {list(values_shape)}")
            return
        size, (steps_shape, steps_dtype) = math.prod(shape), roles[STEPS]
        if steps_dtype not in STEP_DTYPES or len(steps_shape) != 1 or len(values_shape) != 1:
            raise WeightsError(f"{name} needs steps of uint8 or uint16 and values, each in one dimension")
        count, steps = values_shape[0], steps_shape[0]
        if count > size or not count <= steps <= max_steps(count, size, steps_dtype):
            raise WeightsError(f"{name} has {size} elements: {count} values with {steps} steps cannot be its changes")

    def put(self, key: str, tensor: Tensor) -> tuple[str, TensorDelta] | None:
        """Take one of the announced tensors; the name and changes of a tensor that is complete with it."""
        name, role = _split(key)
        if role == "":
            return name, TensorDelta(None, tensor)
        parts = self._parts.setdefault(name, {})
        parts[role] = tensor
        if len(parts) < 2:
            return None
        del self._parts[name]
        values = parts[VALUES]
        try:
            size = math.prod(self.described[name][1])
            return name, TensorDelta(decode_steps(parts[STEPS].numpy(), len(values), size), values)
        except WeightsError as error:
            raise WeightsError(f"{name}: {error.message}") from None


def _split(key: str) -> tuple[str, str]:
    role = next((role for role in (STEPS, VALUES) if key.endswith(role)), "")
    return key.removesuffix(role), role


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def file_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """A safetensors file of these tensors, made piece by piece without a copy of them.  Raises TypeError."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which weights and their parts do not have")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    packed = json.dumps(header, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)
    yield len(packed).to_bytes(8, "little") + packed
    pieces, size = [], 0  # of small tensors, or the ends of others, that go together
    for name in tensors:
        flat = np.from_dlpack(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8))
        for first in range(0, len(flat), PIECE):
            pieces.append(flat[first : first + PIECE].tobytes())
            size += len(pieces[-1])
            if size >= PIECE:
                yield b"".join(pieces)
                pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


def difference(old: Tensor, new: Tensor) -> tuple[TensorDelta, int] | None:
    """What changes when `old`, a contiguous CPU tensor, becomes `new`, rounded to its dtype, and what that adds to its
    sum; None: nothing.  Bits are compared."""
    before, flat = bits_of(old), new.detach().reshape(-1)
    compiled = native is not None and old.dtype in COMPARED
    find = _Compiled(old.dtype, min(len(before), PIECE)) if compiled else _by_numpy
    indices, values, added = [], [], 0
    for first in range(0, len(before), PIECE):
        piece = flat[first : first + PIECE]
        if not (compiled and piece.is_cpu and piece.dtype in COMPARED):
            piece = piece.to("cpu", old.dtype)
        places, bits, more = find(before[first : first + PIECE], piece, first)
        if len(places):
            indices.append(places)
            values.append(bits)
            added += more
    count = sum(map(len, indices))
    if not count:
        return None
    if count >= DENSE_FROM * len(before):
        return TensorDelta(None, new.detach().to("cpu", old.dtype, copy=True).contiguous()), added
    return TensorDelta(np.concatenate(indices), as_tensor(np.concatenate(values), old.dtype)), added


def as_tensor(bits: Bits, dtype: torch.dtype) -> Tensor:
    """Unsigned integers as elements of `dtype`; a view."""
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(dtype)


class _Compiled:
    """`difference` of a piece by the extension, which rounds as it compares; `dtype`: of the old elements."""

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        self._dtype = dtype
        self._places, self._indices = np.empty(size, np.uint32), np.empty(size, np.int64)
        self._values = np.empty(size, f"u{dtype.itemsize}")

    def __call__(self, old: Bits, new: Tensor, first: int) -> tuple[NDArray[np.int64], Bits, int]:
        names, room = (dtype_name(self._dtype), dtype_name(new.dtype)), (self._places, self._indices, self._values)
        count, added = native.difference(old, names[0], bits_of(new), names[1], first, *room)
        return self._indices[:count].copy(), self._values[:count].copy(), added


def _by_numpy(old: Bits, new: Tensor, first: int) -> tuple[NDArray[np.int64], Bits, int]:
    """(indices, new bits, what they add to the sum) of a piece that begins with element `first`."""
    bits = bits_of(new)
    places = _changed(old, bits)
    return places + first, bits[places], change(places + first, old[places], bits[places])


def _changed(old: Bits, new: Bits) -> NDArray[np.int64]:
    """Places that differ: words of 64 bits are compared first, as few of them differ."""
    size = 8 // old.itemsize
    whole = len(old) // size * size
    one, other = (bits[:whole].view(np.uint64) for bits in (old, new))
    words = np.flatnonzero(one != other)
    within = np.flatnonzero((one[words] ^ other[words]).view(old.dtype) != 0)
    shift = size.bit_length() - 1  # of a power of two
    places: NDArray[np.int64] = (words[within >> shift] << shift) + (within & (size - 1))
    rest = np.flatnonzero(old[whole:] != new[whole:])
    return np.concatenate([places, rest + whole]) if len(rest) else places
