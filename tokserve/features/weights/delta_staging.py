"""A delta, staged beside the weights that serve: which elements become what, checked before any of them is written.

What it takes is memory for the changed elements, and for the tensors that come whole.  `apply` then writes them where
the old ones are, so the addresses of weights do not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from tokserve.base.errors import Conflict, RequestError
from tokserve.features.weights.coordinates import CHUNK, Coordinates
from tokserve.layers.places import Indices, Place, gather, scatter
from tokserve.models import weights
from tokserve.models.decoder import Decoder
from tokserve.models.formats import is_finite
from tokserve.models.provenance import Provenance
from tokserve.rl import sums
from tokserve.rl.deltas import DeltaLabel, DeltaReader, TensorDelta, label_of

Described = tuple[str, tuple[int, ...], torch.dtype | str]


class DeltaStaging:
    """`base`: the version that serves, and its checksum; `base_sums`: of the parts of its tensors that are here.
    Errors are RequestErrors, and name tensors."""

    def __init__(
        self,
        decoder: Decoder,
        coordinates: Coordinates,
        base: tuple[str, str],
        base_sums: sums.Sums,
        *,
        check_finite: bool = True,
    ) -> None:
        self.decoder = decoder
        self.coordinates = coordinates
        self.sums = dict(base_sums)
        self.label: DeltaLabel | None = None  # of a file, if the delta came in one
        self.num_bytes = 0  # of the values that came
        self._base, self.base_checksum = base
        self.checksum = self.base_checksum
        self._check_finite = check_finite
        self._reader = DeltaReader(coordinates.described)
        self._writes: list[tuple[Place, Indices | None, Tensor]] = []
        self._changed: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._not_finite: list[str] = []

    def begin_file(self, metadata: dict[str, str]) -> None:
        """The metadata of a file.  Raises Conflict if its delta is of other weights than those that serve."""
        label = label_of(metadata)
        check_base(label.base_version, label.base_checksum, self._base, self.base_checksum)
        if self.label is not None and label != self.label:
            raise RequestError("the files of an update must have the same versions and checksums in their metadata")
        self.label = label

    def announce(self, tensors: Iterable[Described]) -> None:
        """The tensors of a file."""
        self._reader.announce([(self._name(name), shape, dtype) for name, shape, dtype in tensors])

    def push(self, name: str, tensor: Tensor) -> None:
        complete = self._reader.put(self._name(name), tensor)
        if complete is not None:
            self.add(*complete)

    def _name(self, name: str) -> str:
        """The model's name for a tensor; a tied head is the embedding."""
        renamed = weights.model_name(name, self.coordinates.renames) or name
        return self.coordinates.tied.get(renamed, renamed)

    def add(self, name: str, delta: TensorDelta) -> None:
        """Stage the changes of a tensor, whose indices are within it and ascend.  They are kept, not copied."""
        if name in self._changed:
            raise RequestError(f"{name} was sent twice")
        self._changed.add(name)
        self.num_bytes += delta.values.nbytes
        if self._pool is None:
            self._pool = ThreadPoolExecutor(sums.THREADS)
        self._pending.append(self._pool.submit(self._add, name, delta))

    def _add(self, name: str, delta: TensorDelta) -> None:
        dtype, _ = self.coordinates.described[name]
        values = delta.values.contiguous()
        if self._check_finite and not is_finite(values, dtype):
            self._not_finite.append(name)
            return
        places = self.coordinates.places(name)
        if not places:  # another rank has the tensor
            return
        if delta.indices is None:
            values, self.sums[name] = self.coordinates.held_values(name, values)
            self._writes += [(place, None, values) for place in places]
            return
        held = self.coordinates.held(name, delta.indices, values)
        if len(held.indices):
            positions = [place.positions(held.local) for place in places]
            old = gather(places[0], positions[0], dtype)
            added = sums.change(held.indices, sums.bits_of(old), sums.bits_of(held.values))
            self.sums[name] = (self.sums[name] + added) % (1 << 64)
            self._writes += [(place, where, held.values) for place, where in zip(places, positions, strict=True)]

    def finish(self, checksum: str | None) -> None:
        """Compare the checksum of the result; `checksum`: what it must be, if no file says it."""
        self.checksum = self.coordinates.checksum(self._finished)
        expected = {one for one in (checksum, None if self.label is None else self.label.checksum) if one}
        if not expected:
            raise RequestError(
                "the checksum of the delta's result is missing: send it with finish_weight_update, or in the file",
                field="checksum",
            )
        for one in expected:
            if one != self.checksum:
                raise Conflict(
                    f"with this delta the weights would have the checksum {self.checksum}, but it says {one}: it was "
                    "made from other weights, or changed on its way; push full weights",
                    field="checksum",
                    code="checksum_mismatch",
                )

    def _finished(self) -> sums.Sums:
        """The sums of the result's parts here."""
        try:
            for future in self._pending:
                future.result()
        finally:
            self.close()
        if self._not_finite:
            raise weights.not_finite(sorted(self._not_finite), self.decoder.dtype)
        return self.sums

    def close(self) -> None:
        """End what is still being staged."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._pending.clear()

    def apply(self) -> Decoder:
        """Write the changes, between two steps; returns the decoder, which has the new weights."""
        with torch.inference_mode():
            for place, positions, values in self._writes:
                if positions is not None:
                    scatter(place, positions, values)
                else:
                    _replace(place, values.view(-1))
        self.decoder.provenance = Provenance()
        self.decoder.provenance.set_generator(self.coordinates.tensors)
        return self.decoder


def _replace(place: Place, values: Tensor) -> None:
    for first in range(0, len(values), CHUNK):
        part = values[first : first + CHUNK]
        scatter(place, place.positions(np.arange(first, first + len(part))), part)


def check_base(version: str, checksum: str, served_version: str, served_checksum: str | None) -> None:
    """Raise Conflict unless a delta of those weights applies to those that serve; checksum None: not known yet."""
    if version == served_version and served_checksum in (None, checksum):
        return
    raise Conflict(
        f"the delta is of version {version!r} with the checksum {checksum}, but version {served_version!r}"
        + (f" with the checksum {served_checksum}" if served_checksum is not None else "")
        + " serves: push the deltas between the two in order, or full weights",
        field="base_version" if version != served_version else "base_checksum",
        code="base_mismatch",
    )
