"""The adapters' slots of a running model: an adapter is read in the background and put into its slot between two steps.

The memory of all slots is allocated at the start and never moves.  The engine assigns slots to adapters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from tokserve.base.errors import NotFound, RequestError
from tokserve.config import Config, LoraConfig, WeightsConfig
from tokserve.features.lora import adapter_files
from tokserve.features.lora.layer import LoraSlots
from tokserve.features.lora.pushed_adapter import AdapterFit, AdapterStaging, PushedAdapter, check_push_base
from tokserve.features.weights import weight_sources as sources
from tokserve.layers.low_rank import LowRank
from tokserve.models.decoder import Decoder
from tokserve.rl.digests import checksum


class LoraTables:
    """Slots for every projection of `model`; `source`: where adapters may come from, and how they are checked."""

    def __init__(self, config: LoraConfig, model: Decoder, source: WeightsConfig) -> None:
        self._check_finite = source.check_weights == "finite"
        self._dtype = model.dtype
        self._max_rank = config.max_lora_rank
        self._allowed = source.allowed_weight_dirs
        self._renames = model.spec.renames
        self._layers = {
            name: LoraSlots(linear.inputs, linear.shards, config.max_loras, config.max_lora_rank, linear.dtype)
            for name, linear in model.named_linears().items()
        }
        targets, linears = model.adapter_targets(), model.named_linears()
        self._slots = {target: (self._layers[name], shard) for target, (name, shard) in targets.items()}
        self._parts = {target: partial(linears[name].adapter_part, shard) for target, (name, shard) in targets.items()}
        self._sizes = model.adapter_sizes()
        self._read: dict[str, LowRank] | None = None  # not in a slot yet
        self._fit = AdapterFit(self._sizes, self._renames, self._max_rank, self._check)
        self._pushed: dict[str, PushedAdapter] = {}  # by the key of the push

    def _check(self, weights: Mapping[str, LowRank]) -> None:
        if self._check_finite:
            adapter_files.check_finite(weights, self._dtype)

    def attach(self, model: Decoder) -> None:
        """Make a model's projections use these slots."""
        for name, linear in model.named_linears().items():
            linear.lora = self._layers[name]

    def begin_push(self, key: str, config: dict[str, Any], base: Mapping[str, str] | None = None) -> AdapterStaging:
        """What takes the tensors of an adapter, which is kept under `key`.  `base`: of a delta, {"key": of what it
        changes, "served_version", "version", "checksum"}.  Raises RequestError."""
        changed = None
        if base is not None:
            pushed = self._pushed.get(base["key"])
            check_push_base(pushed, base["served_version"], base["version"], base["checksum"])
            changed = None if pushed is None else (pushed, base["served_version"])
        return AdapterStaging(config, self._fit, lambda complete: self._pushed.update({key: complete}), changed)

    def drop(self, key: str) -> None:
        """Forget what was pushed, if it is there."""
        self._pushed.pop(key, None)

    def read(self, lora_path: str = "", *, anywhere: bool = False, pushed: str | None = None) -> str:
        """Read an adapter into host memory, in place of one that was not placed; the digest of its weights.  Raises
        RequestError.  `anywhere`: from a directory that need not be among the allowed ones.  `pushed`: the key of one
        that was pushed."""
        self._read = None
        weights = self._read_directory(lora_path, anywhere=anywhere) if pushed is None else self._take_pushed(pushed)
        self._read = {name: part(weights[name]) for name, part in self._parts.items() if name in weights}
        return _digest(self._read)

    def _take_pushed(self, key: str) -> dict[str, LowRank]:
        if key not in self._pushed:
            raise RequestError("its tensors were pushed to an engine that is gone: push it again", field="lora_name")
        return self._fit.weights(self._pushed[key])

    def _read_directory(self, lora_path: str, *, anywhere: bool) -> dict[str, LowRank]:
        allowed = None if anywhere else self._allowed
        try:
            directory = sources.allowed_directory(lora_path, allowed, adapter_files.FIELD)
        except sources.NoDirectory as error:
            raise NotFound(error.message, field=adapter_files.FIELD) from None  # trainers try again: file systems lag
        sources.check_files(directory, (adapter_files.CONFIG, adapter_files.TENSORS), allowed, adapter_files.FIELD)
        weights = adapter_files.read_adapter(directory, self._sizes, self._renames, self._max_rank)
        self._check(weights)
        return weights

    def place(self, slot: int) -> None:
        """Put the adapter that was read last into a slot, in place of what is there; once."""
        weights, self._read = self._read, None
        if weights is None:
            raise RuntimeError("no adapter has been read")
        for name, (slots, shard) in self._slots.items():
            slots.place(slot, shard, weights.get(name))

    def num_bytes(self) -> int:
        return sum(slots.num_bytes() for slots in self._layers.values())


def make_slots(config: Config, model: Decoder) -> LoraTables | None:
    """The slots of a model, which uses them from now on; None without --enable-lora."""
    if not config.lora.enable_lora:
        return None
    slots = LoraTables(config.lora, model, config.weights)
    slots.attach(model)
    return slots


def _digest(adapter: Mapping[str, LowRank]) -> str:
    """SHA-256 over the weights of an adapter, as hex."""
    digest = hashlib.sha256()
    for name in sorted(adapter):
        low_rank = adapter[name]
        digest.update(f"{name} {checksum(low_rank.down)} {checksum(low_rank.up)} {low_rank.scale!r}\n".encode())
    return digest.hexdigest()
