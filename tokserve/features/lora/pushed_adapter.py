"""An adapter that is pushed: its tensors come one by one, whole or as changes of those that were pushed before.

They are kept in host memory as they came, so that the adapter can be put into a slot at any time, and be the base of
the next delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokserve.base.errors import Conflict, RequestError
from tokserve.features.lora import adapter_files
from tokserve.features.lora.adapter_files import AdapterConfig, Sizes
from tokserve.layers.low_rank import LowRank
from tokserve.models.weights import Entry
from tokserve.rl.deltas import DeltaLabel, DeltaReader, applied, label_of
from tokserve.rl.sums import set_checksum, tensor_sum

SOURCE = "the push"


@dataclass(frozen=True, slots=True)
class PushedAdapter:
    """`tensors`: by PEFT's names, as they were sent.  `checksum`: theirs, as `rl.sums` computes it."""

    config: AdapterConfig
    tensors: dict[str, Tensor]
    checksum: str


@dataclass(frozen=True, slots=True)
class AdapterFit:
    """What an adapter has to fit: the projections' sizes, the checkpoint's names and the highest rank.  `check`:
    refuses complete weights."""

    sizes: Sizes
    renames: tuple[tuple[str, str], ...]
    max_rank: int
    check: Callable[[Mapping[str, LowRank]], None]

    def check_tensors(self, tensors: Mapping[str, Entry], config: AdapterConfig, *, complete: bool) -> None:
        """Raise RequestError for names, shapes and dtypes that do not fit."""
        paired = adapter_files.pair_tensors(tensors, self.renames, SOURCE, complete=complete)
        adapter_files.check_fit(paired, config, self.sizes, self.max_rank, SOURCE)

    def weights(self, pushed: PushedAdapter) -> dict[str, LowRank]:
        """Weights by projection."""
        paired = adapter_files.pair_tensors(_entries(pushed.tensors), self.renames, SOURCE)
        return {
            module: LowRank(pushed.tensors[parts["A"].key], pushed.tensors[parts["B"].key], pushed.config.scale(module))
            for module, parts in paired.items()
        }


class AdapterStaging:
    """Takes tensors until `finish`, which hands the adapter to `keep`.  `base`: what a delta changes, and its version;
    None: all tensors come.  Errors are RequestErrors."""

    def __init__(
        self,
        config: dict[str, Any],
        fit: AdapterFit,
        keep: Callable[[PushedAdapter], None],
        base: tuple[PushedAdapter, str] | None = None,
    ) -> None:
        with _about("lora_config"):
            self._config = adapter_files.parse_config(config)
        self._fit, self._keep = fit, keep
        self.num_bytes = 0  # of what came
        self._base = None if base is None else base[0]
        self._base_version = "" if base is None else base[1]
        self._tensors: dict[str, Tensor] = {} if self._base is None else dict(self._base.tensors)
        self._announced: dict[str, Entry] = {}
        self._changed: set[str] = set()
        self._reader = None if self._base is None else DeltaReader(_described(self._base.tensors))
        self._label: DeltaLabel | None = None

    @property
    def is_delta(self) -> bool:
        """Whether the changes of what was pushed before come."""
        return self._base is not None

    def begin_file(self, metadata: dict[str, str]) -> None:
        """The metadata of a file.  Raises Conflict if its delta is of another base."""
        if self._base is None:
            return
        label = label_of(metadata)
        check_push_base(self._base, self._base_version, label.base_version, label.base_checksum)
        if self._label is not None and label != self._label:
            raise RequestError("the files of an update must have the same versions and checksums in their metadata")
        self._label = label

    def announce(self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype | str]]) -> None:
        """Refuse what does not fit, before memory is taken for it."""
        described = list(tensors)
        if self._reader is not None:
            self._reader.announce(described)
            return
        entries = {name: Entry(Path(), name, tuple(shape), dtype) for name, shape, dtype in described}
        if twice := sorted(self._announced.keys() & entries.keys()):
            raise RequestError(f"{twice[0]} was sent twice")
        if entries:
            with _about(None):
                self._fit.check_tensors(self._announced | entries, self._config, complete=False)
        self._announced |= entries

    def push(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; a copy is made."""
        if self._reader is None:
            if name not in self._announced:
                self.announce([(name, tuple(tensor.shape), tensor.dtype)])
            self._put(name, tensor.detach().to("cpu", copy=True).contiguous())
            return
        complete = self._reader.put(name, tensor.clone())
        if complete is not None:
            changed, delta = complete
            self._put(changed, applied(delta, self._tensors[changed].clone()))

    def _put(self, name: str, tensor: Tensor) -> None:
        if name in self._changed:
            raise RequestError(f"{name} was sent twice")
        self._changed.add(name)
        self._tensors[name] = tensor
        self.num_bytes += tensor.nbytes

    def finish(self, checksum: str | None) -> dict[str, Any]:
        """Check the adapter: {"checksum", "version": as a delta's file says, "num_bytes"}.  `checksum`: what it must
        have; of a delta the file may say it."""
        with _about(None):
            self._fit.check_tensors(_entries(self._tensors), self._config, complete=True)
        sums = {name: tensor_sum(tensor) for name, tensor in self._tensors.items()}
        pushed = PushedAdapter(self._config, self._tensors, set_checksum(sums, _described(self._tensors)))
        stated = {one for one in (checksum, None if self._label is None else self._label.checksum) if one}
        if self.is_delta and not stated:
            raise RequestError(
                "the checksum of the delta's result is missing: send it with finish_weight_update, or in the file",
                field="checksum",
            )
        for one in stated:
            if one != pushed.checksum:
                raise Conflict(
                    f"the adapter has the checksum {pushed.checksum}, not {one}: it changed on its way, or the delta "
                    "was made from another one; push all of it",
                    field="checksum",
                    code="checksum_mismatch",
                )
        with _about(None):
            self._fit.check(self._fit.weights(pushed))
        self._keep(pushed)
        version = None if self._label is None else self._label.version
        return {"checksum": pushed.checksum, "version": version, "num_bytes": self.num_bytes}


def check_push_base(base: PushedAdapter | None, served_version: str, version: str, checksum: str) -> None:
    """Raise Conflict unless a delta of that version and checksum is one of the adapter that was pushed last."""
    if base is None:
        raise Conflict(
            "no tensors of the adapter were pushed that a delta could change: push all of it",
            field="base_version",
            code="base_mismatch",
        )
    if (version, checksum) != (served_version, base.checksum):
        raise Conflict(
            f"the delta is of version {version!r} with the checksum {checksum}, but version {served_version!r} with "
            f"the checksum {base.checksum} serves: push all of the adapter",
            field="base_version" if version != served_version else "base_checksum",
            code="base_mismatch",
        )


@contextmanager
def _about(field: str | None) -> Iterator[None]:
    """Errors about a directory as those about this field."""
    try:
        yield
    except RequestError as error:
        error.field = field
        raise


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    return {name: Entry(Path(), name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
