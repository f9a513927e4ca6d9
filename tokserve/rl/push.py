"""Weights pushed by a trainer: all of them, or the elements that changed since the last push.

What was pushed last is kept in host memory, rounded as the server keeps it: two bytes a parameter for a bfloat16
server.  It is compared with the next set bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .deltas import DeltaLabel, Deltas, applied, are_equal, difference, dtype_name, file_pieces, index_dtype, tensors_of
from .sums import Sums, completed, in_threads, set_checksum, tensor_sum
from .weight_pairs import Pairs, own_copy

Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]
PART_BYTES = 1 << 20  # of changed elements that are sent, at least, while other tensors are compared
MAX_CHANGED = 0.25  # share of a set's bytes above which a full push is sent instead


@dataclass(frozen=True, slots=True)
class PushResult:
    """What a push did.  `mode`: "full" or "delta"; `reason`: why a delta that was asked for was not sent.

    `num_bytes`: of the tensors that were sent or written, with their header.  `num_changed`: elements that differ from
    the last push (of a full push: all) of `num_elements`.  `version_reused`: earlier weights had the version too, and
    may have been others; only the epoch tells them apart.
    """

    weight_version: str
    epoch: int
    mode: str
    num_bytes: int
    num_changed: int
    num_elements: int
    reason: str | None = None
    version_reused: bool = False


def is_rounded(tensor: Tensor) -> bool:
    """Whether a server rounds it, which it does with floats of 16 bits and more; others are parts of weights."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1


@dataclass(slots=True)
class ServerTensors:
    """The tensors of a server, as `/weight_info?tensors=true` lists them.  `refusal`: why it takes no deltas."""

    described: Described
    tied: dict[str, str]
    renames: list[tuple[str, str]]
    refusal: str | None

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> ServerTensors:
        described = {name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in reply["tensors"].items()}
        return cls(described, reply["tied"], [(a, b) for a, b in reply["renames"]], reply["delta_refusal"])

    def model_name(self, name: str) -> str:
        """The server's name for a tensor of a checkpoint."""
        renamed = next((new + name.removeprefix(old) for old, new in self.renames if name.startswith(old)), name)
        return self.tied.get(renamed, renamed)

    def target(self, name: str, tensor: Tensor) -> str | None:
        """The server's name for a tensor that it rounds; None: it has none like this."""
        target = self.model_name(name)
        fits = target in self.described and tuple(tensor.shape) == self.described[target][1]
        return target if fits and is_rounded(tensor) else None

    def collected(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(tensors under the server's names, others), of weights that stay.  A tied tensor that comes under two names
        is one of the first, and of the others if the two differ: the server refuses them then."""
        known: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            target = self.target(name, tensor)
            if target is None:
                others[name] = tensor
            elif target not in known:
                known[target] = tensor
            elif tensor.data_ptr() != known[target].data_ptr() and not torch.equal(tensor, known[target]):
                others[name] = tensor
        return known, others

    def copied(self, weights: Pairs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Likewise of weights that do not stay: copies in host memory, those of the first rounded."""
        known: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, tensor, is_known in self.copies(weights):
            (known if is_known else others)[name] = tensor
        return known, others

    def copies(self, weights: Pairs, device: str | None = "cpu") -> Iterator[tuple[str, Tensor, bool]]:
        """(name, tensor, whether it is under the server's name), one by one: rounded copies, a tied one once if both
        are the same; `device` None: where the tensors are."""
        came: set[str] = set()
        tied = {target: torch.empty(0) for target in self.tied.values()}
        for name, tensor in weights:
            target = self.target(name, tensor)
            copy = own_copy(tensor, None if target is None else self.described[target][0], device)
            if target is None or (target in came and target not in tied):
                yield name, copy, False
            elif target not in came:
                came.add(target)
                if target in tied:
                    tied[target] = copy
                yield target, copy, True
            elif not torch.equal(copy, tied[target]):
                yield name, copy, False


@dataclass(slots=True)
class Offered:
    """What is to be pushed: tensors under the server's names, and others.  `copied`: they are rounded copies.
    `changes`: from what was pushed last, with the sums of all, where they are known already."""

    known: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    copied: bool = False
    changes: tuple[Deltas, Sums] | None = None


class ChangedTensors(Mapping[str, Tensor]):
    """Tensors with their changes, each made when it is asked for."""

    def __init__(self, before: Mapping[str, Tensor], deltas: Deltas) -> None:
        self._before, self._deltas = before, deltas

    def __getitem__(self, name: str) -> Tensor:
        return applied(self._deltas.get(name), self._before[name].clone())

    def __iter__(self) -> Iterator[str]:
        return iter(self._before)

    def __len__(self) -> int:
        return len(self._before)


@dataclass(slots=True)
class PushedWeights:
    """What a server has got: rounded copies of all its tensors, their sums, the version and the checksum."""

    tensors: dict[str, Tensor]
    sums: Sums
    described: Described
    version: str = ""
    checksum: str = field(init=False)

    def __post_init__(self) -> None:
        self.checksum = set_checksum(self.sums, self.described)

    @classmethod
    def of(cls, server: ServerTensors, known: Mapping[str, Tensor], *, copied: bool = False) -> PushedWeights:
        """Copy and sum a whole set; `copied`: these are copies already."""
        tensors = (
            dict(known)
            if copied
            else {name: own_copy(tensor, server.described[name][0]) for name, tensor in known.items()}
        )
        sums = in_threads((name, partial(tensor_sum, tensor)) for name, tensor in tensors.items())
        return cls(tensors, sums, server.described)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def num_elements(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def found(self, server: ServerTensors, pairs: Pairs) -> Offered:
        """How weights differ from the ones that were pushed, tensor by tensor, as they do not stay."""
        deltas, sums, came, others = Deltas(), dict(self.sums), set(), {}
        for name, tensor in pairs:
            target = server.target(name, tensor)
            if target is None:
                others[name] = own_copy(tensor)
                continue
            delta, added = difference(self.tensors[target], tensor) or (None, 0)
            if target in came:
                if not are_equal(delta, deltas.get(target)):
                    others[name] = own_copy(tensor)
                continue
            came.add(target)
            if delta is not None:
                deltas[target] = delta
                sums[target] = (sums[target] + added) % (1 << 64)
        known = ChangedTensors({name: self.tensors[name] for name in self.tensors if name in came}, deltas)
        return Offered(known, others, copied=True, changes=(deltas, sums))

    def changes(self, known: Mapping[str, Tensor]) -> tuple[Deltas, Sums]:
        """How these tensors differ from the ones that were pushed, and the sums of all of them."""
        deltas, sums = Deltas(), dict(self.sums)
        for part in self.parts(known, sums):
            deltas |= part
        return deltas, sums

    def parts(self, known: Mapping[str, Tensor], sums: Sums) -> Iterator[Deltas]:
        """The changes, of some tensors at a time while the others are compared; `sums` are brought up to date."""
        largest_first = sorted(known.items(), key=lambda item: -item[1].numel())
        calls = ((name, partial(difference, self.tensors[name], tensor)) for name, tensor in largest_first)
        part, size = Deltas(), 0
        for results in completed(calls):
            for name, changed in results.items():
                if changed is not None:
                    part[name], added = changed
                    sums[name] = (sums[name] + added) % (1 << 64)
                    size += part[name].values.nbytes
            if size >= PART_BYTES:
                yield part
                part, size = Deltas(), 0
        if part:
            yield part

    def label(self, sums: Sums, version: str) -> DeltaLabel:
        """The label of the delta that leads to a set with these sums."""
        return replace(self.label_of_part(version), checksum=set_checksum(sums, self.described))

    def label_of_part(self, version: str) -> DeltaLabel:
        return DeltaLabel(self.version, self.checksum, version, "")

    def commit(self, deltas: Deltas, sums: Sums, label: DeltaLabel) -> None:
        """The server has taken it."""
        for name, delta in deltas.items():
            self.tensors[name] = applied(delta, self.tensors[name])
        self.sums, self.version, self.checksum = sums, label.version, label.checksum


def file_of(deltas: Deltas, label: DeltaLabel) -> tuple[int, Iterator[bytes]]:
    """A delta as a file: its size, and its pieces."""
    tensors = tensors_of(deltas)
    pieces = file_pieces(tensors, label.metadata())
    header = next(pieces)

    def all_pieces() -> Iterator[bytes]:
        yield header
        yield from pieces

    return len(header) + sum(tensor.nbytes for tensor in tensors.values()), all_pieces()


def num_changed(deltas: Deltas) -> int:
    """The number of changed elements."""
    return sum(delta.num_changed for delta in deltas.values())


def is_large(deltas: Deltas, pushed: PushedWeights) -> bool:
    """Whether all tensors are no more to send."""
    return sum(delta.values.nbytes for delta in deltas.values()) > MAX_CHANGED * pushed.num_bytes


def sparse_broadcast(deltas: Deltas, shapes: Mapping[str, Sequence[int]]) -> tuple[dict[str, Any], list[Tensor]]:
    """An announcement for a process group, and the tensors to send: indices and values of each.  `shapes`: of the whole
    tensors."""
    names, tensors = list(deltas), []
    for name in names:
        delta = deltas[name]
        indices = np.arange(delta.num_changed) if delta.indices is None else delta.indices
        tensors += [torch.from_numpy(indices).to(index_dtype(shapes[name])), delta.values.view(-1)]
    announced = {
        "names": names,
        "dtype_names": [dtype_name(deltas[name].values.dtype) for name in names],
        "shapes": [list(shapes[name]) for name in names],
        "num_updates_list": [deltas[name].num_changed for name in names],
    }
    return announced, tensors
