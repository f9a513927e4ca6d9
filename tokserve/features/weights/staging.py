"""A second set of weights, filled tensor by tensor while the first one serves.

It is a decoder of its own, so a fused parameter takes its parts exactly as at the start, and the swap is one reference.
Every tensor is checked before it is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tokserve.base.errors import RequestError, StartError
from tokserve.layers.parameter import StoredWeight, as_dense
from tokserve.models import dummy, kv_scales, weights
from tokserve.models.decoder import Decoder
from tokserve.models.formats import WHOLE, Described, Part, is_finite
from tokserve.models.provenance import EMBEDDING, HEAD, Provenance
from tokserve.models.weights import Entry


class Staging:
    """`decoder` has no weights yet.  Errors are RequestErrors that list the tensors.  `checksums`: compute those
    of pushed tensors.

    The parts of a weight may come in any order, in the checkpoint format of the decoder's config.json.
    `check_finite`: `finish` refuses weights that are not finite.
    """

    def __init__(self, decoder: Decoder, *, checksums: bool = True, check_finite: bool = True) -> None:
        self._decoder = decoder
        self._format = decoder.spec.format
        self.provenance = decoder.provenance = Provenance(enabled=checksums)
        self._check_finite = check_finite
        self.num_bytes = 0  # of what came
        self._not_finite: list[str] = []  # in the order in which they came
        self._names = tuple(decoder.parameters_by_name())
        stacked = decoder.stacked_parameters()
        self._covers = {name: frozenset(one.covers) for name, one in stacked.items()}
        self._covered_by = {covered: name for name, one in stacked.items() for covered in one.covers}
        self._parameters = decoder.parameters_by_name() | {name: one.parameter for name, one in stacked.items()}
        self._known = self._parameters | ({HEAD: self._parameters[EMBEDDING]} if decoder.spec.tied else {})
        self._received: set[str | Part] = set()  # names of tensors and of complete weights, and the tensors' parts
        self._parts: dict[str, dict[str, Tensor]] = {}  # of incomplete weights, by role
        self._shared: dict[str, bytes] = {}  # digests of what came for a tied model's one tensor
        self._cache_scales: dict[str, Tensor] = {}  # of a float8 KV cache; they may be missing
        self._cache_scale_names = kv_scales.names(len(decoder.spec.blocks))

    def announce(
        self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype | str]], *, whole: bool = False
    ) -> None:
        """Refuse names, shapes and dtypes that do not fit, and what has come already, all in one list.  `whole`: none
        of them is a part of a weight."""
        entries: dict[str, Entry] = {}
        seen: set[str | Part] = set()
        duplicates = []
        for name, shape, dtype in tensors:
            entry = Entry(Path(), name, shape, dtype)
            target, part = self._part(name, entry, whole=whole)
            if part is None:
                continue
            same = {target, part, *self._covers.get(target, ())}
            if target in self._covered_by:
                same.add(self._covered_by[target])
            if not seen.isdisjoint(same) or not self._received.isdisjoint(same):
                duplicates.append(name)
            seen |= {target, part}
            if target in self._cache_scale_names:
                continue
            if part.role == WHOLE:
                entries[target] = entry
            elif part.weight not in self._known or not self._format.fits(
                part.role, entry, self._known[part.weight].shape
            ):
                entries[target] = replace(entry, dtype=torch.float32)  # its dtype is right for its role
        problems = weights.mismatches(entries, self._known, complete=False)
        if duplicates:
            problems.append(weights.counted("sent twice", duplicates))
        problems += sorted({why for entry in entries.values() if (why := self._format.refusal(entry))})
        if problems:
            raise RequestError(f"the tensors of the update do not fit the model: {'; '.join(problems)}")

    def push(self, name: str, tensor: Tensor) -> None:
        """Take a pushed tensor (a copy is made) and record its checksum."""
        self.announce([(name, tuple(tensor.shape), tensor.dtype)])
        target, part = self._part(name, tensor)
        if part is not None:
            self._receive(name, target, part, (tensor,))
            if part.role == WHOLE:
                self._take(target, tensor)
            else:
                self._collect(part, tensor)
        self.provenance.add_pushed(name, tensor)

    def put(self, name: str, weight: Tensor | StoredWeight) -> None:
        """Take a whole weight (a copy is made); the caller records in `provenance` where it came from."""
        self.announce([(name, tuple(weight.shape), weight.dtype)], whole=True)
        target, part = self._part(name, weight, whole=True)
        if part is not None:
            self._receive(name, target, part, (weight,) if isinstance(weight, Tensor) else weight.tensors())
            self._take(target, weight)

    def draw(self, seed: int) -> None:
        """Take random weights, those of `--load-format dummy` with this seed."""
        if self._format.needs != {WHOLE}:
            raise RequestError(f"random weights cannot replace weights that are stored in {self._format.name} form")
        parameters = self._decoder.parameters_by_name()
        for name, tensor in dummy.tensors(parameters, seed):
            self.put(name, tensor)
        self.provenance.set_generator(lambda: dummy.tensors(parameters, seed))

    def _receive(self, name: str, target: str, part: Part, tensors: tuple[Tensor, ...]) -> None:
        self._received |= {target, part}
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        if self._check_finite and not all(is_finite(tensor, self._decoder.dtype) for tensor in tensors):
            self._not_finite.append(name)

    def _collect(self, part: Part, tensor: Tensor) -> None:
        """Keep a copy of a weight's part; the last one that it may have completes the weight."""
        parts = self._parts.setdefault(part.weight, {})
        parts[part.role] = tensor.clone()
        if parts.keys() == self._format.needs | self._format.optional:
            self._assemble(part.weight)

    def _assemble(self, weight: str) -> None:
        parts = self._parts.pop(weight)
        if not all(self._format.fits(role, part, self._format.shape(parts)) for role, part in parts.items()):
            raise RequestError(f"the parts of {weight} do not fit each other")
        shape, expected = tuple(self._format.shape(parts)), self._known[weight].shape
        if shape != expected:
            raise RequestError(f"the parts of {weight} form a weight of shape {list(shape)}, not {list(expected)}")
        self._received.add(weight)
        self._take(weight, self._format.assemble(parts))

    def _take(self, target: str, weight: Tensor | StoredWeight) -> None:
        if target in self._cache_scale_names:
            self._cache_scales[target] = as_dense(weight).clone()
        elif self._decoder.spec.tied and target in (EMBEDDING, HEAD):
            tensor = as_dense(weight)
            if not self._shared:
                self._parameters[EMBEDDING].load(tensor)
            self._shared[target] = self._digest(tensor)
        else:
            self._parameters[target].take(weight)

    def finish(self) -> Decoder:
        """The decoder with all its weights."""
        for weight in [name for name, parts in self._parts.items() if parts.keys() >= self._format.needs]:
            self._assemble(weight)
        stacked = (self._covers[name] for name in self._covers if name in self._received)
        received = self._received.union(*stacked) | ({EMBEDDING} if self._shared else set())
        kinds = [
            ("missing", self._decoder.inherit([name for name in self._names if name not in received])),
            *self._format.incomplete(self._parts),
        ]
        if problems := [weights.counted(kind, names) for kind, names in kinds if names]:
            raise RequestError(f"the update is not complete: {'; '.join(problems)}")
        if self._not_finite:
            raise weights.not_finite(self._not_finite, self._decoder.dtype)
        if len(set(self._shared.values())) > 1:
            raise RequestError(f"{HEAD} differs from {EMBEDDING}, but the model ties them")
        if self._decoder.float8_cache:
            try:
                kv_scales.apply(self._decoder, self._cache_scales)
            except StartError as error:
                raise RequestError(str(error)) from None
        return self._decoder

    def _part(self, name: str, tensor: Described, *, whole: bool = False) -> tuple[str, Part | None]:
        """The model's name for a tensor, and what it is; None: nothing that the model takes."""
        target = weights.model_name(name, self._decoder.spec.renames)
        if target is None:
            return name, None
        part = self._format.part(target, tensor)
        return target, Part(target) if whole and part is not None else part

    def _digest(self, tensor: Tensor) -> bytes:
        plain = tensor.detach().to("cpu", self._decoder.dtype).contiguous()
        return hashlib.sha256(plain.view(-1).view(torch.uint8).numpy().data).digest()
