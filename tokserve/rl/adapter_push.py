"""A LoRA adapter as a trainer has it, and its way to a server: all of its tensors, or what changed in them.

Names and configuration are PEFT's, so that nothing has to be written to a directory that the server can see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from .deltas import DeltaLabel, TensorDelta, difference, file_pieces, tensors_of
from .module_tensors import WRAPPED
from .pusher import CURED_BY_FULL, WeightChannel, announcement, each_piece, transaction
from .sums import set_checksum, tensor_sum
from .weight_pairs import own_copy, plain_tensor

ROOT = "base_model"  # that PEFT's names begin with
Adapter = nn.Module | tuple[Mapping[str, Any], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class AdapterPushResult:
    """What a push of an adapter did.  `generation`: the tokens that it makes are of VERSION+NAME@GENERATION.

    `mode`: "full" or "delta"; `reason`: why a delta that was asked for was not sent.  `num_bytes`: of the tensors that
    were sent.  `weight_version`, `epoch`: of the model, which an adapter changes only under the model's own name.
    """

    lora_name: str
    lora_version: str | None
    generation: int
    checksum: str
    weight_version: str
    epoch: int
    mode: str
    num_bytes: int
    reason: str | None = None


def adapter_parts(adapter: Adapter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The adapter_config.json and the tensors, by PEFT's names, of a module that peft has adapted (its active adapter),
    of a `PolicyModel`, or of a pair of the two.  Raises TypeError."""
    source: Any = adapter
    if isinstance(adapter, tuple):
        config, tensors = adapter
        named = dict(tensors)
    elif hasattr(adapter, "adapter_state"):
        config, named = source.adapter_state()
    elif hasattr(adapter, "peft_config"):
        config, named = _of_peft(adapter)
    else:
        raise TypeError(
            f"an adapter is peft's module, a PolicyModel or (config, tensors), not {type(adapter).__name__}"
        )
    if not named:
        raise TypeError("the adapter has no tensors")
    return {name: _plain(value) for name, value in config.items()}, {
        name: plain_tensor(name, tensor) for name, tensor in named.items()
    }


def _of_peft(module: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    active = module.active_adapters if isinstance(module.active_adapters, list) else [module.active_adapter]
    if len(active) != 1:
        raise TypeError(f"exactly one adapter must be active, and there are {len(active)}: {', '.join(active)}")
    tensors = {}
    for name, tensor in module.named_parameters():
        parts = [part for part in name.split(".") if part not in WRAPPED]
        kinds = [at for at, part in enumerate(parts[:-1]) if part.startswith("lora_")]
        if not kinds or active[0] not in parts[kinds[0] :]:
            continue
        first = parts.index(ROOT) if ROOT in parts else 0
        kept = parts[first : kinds[0] + 1] + [part for part in parts[kinds[0] + 1 :] if part != active[0]]
        tensors[".".join(kept)] = tensor
    return module.peft_config[active[0]].to_dict(), tensors


def _plain(value: Any) -> Any:
    """A setting as JSON has it; a set is sorted, and what JSON does not have is its text."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(one) for one in value)
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True, slots=True)
class _Pushed:
    """What the server has of an adapter."""

    tensors: dict[str, Tensor]
    version: str
    checksum: str


class AdapterPusher:
    """Pushes adapters over one channel, and remembers those that were pushed with `delta`."""

    def __init__(self, channel: WeightChannel) -> None:
        self._channel = channel
        self._pushed: dict[str | None, _Pushed] = {}

    async def push(
        self,
        adapter: Adapter,
        name: str | None,
        version: str | None,
        *,
        delta: bool = False,
        dtype: torch.dtype | None = None,
        recompute_kv: bool = False,
    ) -> AdapterPushResult:
        """Push an adapter; the arguments are those of `AsyncClient.push_adapter`."""
        config, tensors = await asyncio.to_thread(_copied, adapter, dtype)
        checksum = await asyncio.to_thread(_checksum, tensors)
        start = {"lora_config": config} | ({} if name is None else {"lora_name": name})
        finish = {"checksum": checksum} | ({"recompute_kv": True} if recompute_kv else {})
        if version is not None:
            finish["weight_version"] = version
        last, reason = self._pushed.pop(name, None), None
        result = None
        if delta:
            reason = _obstacle(last, tensors)
            if last is not None and reason is None:
                changes = await asyncio.to_thread(_changes, last.tensors, tensors)
                label = DeltaLabel(last.version, last.checksum, version or "", checksum)
                base = {"base_version": last.version, "base_checksum": last.checksum}
                try:
                    result = await self._send_file(start | base, changes, finish, label)
                except self._channel.failures as error:
                    code, reason = self._channel.refusal(error)
                    if code not in CURED_BY_FULL:
                        raise
        if result is None:
            result = await self._send_all(start, tensors, finish, reason)
        if delta:
            self._pushed[name] = _Pushed(tensors, result.lora_version or "", checksum)
        return result

    async def _send_all(
        self, start: dict[str, Any], tensors: dict[str, Tensor], finish: dict[str, Any], reason: str | None
    ) -> AdapterPushResult:
        if not self._channel.has_group:
            return await self._send_file(start, tensors, finish, None, reason)
        async with transaction(self._channel, start) as handle:
            sent = list(tensors.values())
            await self._channel.broadcast(announcement(tensors), sent, packed=True, handle=handle)
            done = await self._channel.finish(finish | handle)
        return _result(done, "full", sum(tensor.nbytes for tensor in sent), reason)

    async def _send_file(
        self,
        start: dict[str, Any],
        tensors: dict[str, Tensor],
        finish: dict[str, Any],
        label: DeltaLabel | None,
        reason: str | None = None,
    ) -> AdapterPushResult:
        num_bytes = 0

        def counted() -> Any:
            nonlocal num_bytes
            for piece in file_pieces(tensors, None if label is None else label.metadata()):
                num_bytes += len(piece)
                yield piece

        async with transaction(self._channel, start) as handle:
            await self._channel.put_file(each_piece(counted()), handle)
            done = await self._channel.finish(finish | handle)
        return _result(done, "full" if label is None else "delta", num_bytes, reason)


def _result(done: dict[str, Any], mode: str, num_bytes: int, reason: str | None) -> AdapterPushResult:
    names = ("lora_name", "lora_version", "generation", "checksum", "weight_version", "epoch")
    return AdapterPushResult(**{name: done[name] for name in names}, mode=mode, num_bytes=num_bytes, reason=reason)


def _copied(adapter: Adapter, dtype: torch.dtype | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = adapter_parts(adapter)
    return config, {name: own_copy(tensor, dtype) for name, tensor in tensors.items()}


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    return set_checksum({name: tensor_sum(tensor) for name, tensor in tensors.items()}, _described(tensors))


def _obstacle(last: _Pushed | None, tensors: Mapping[str, Tensor]) -> str | None:
    """Why no delta can be sent; None: one can."""
    if last is None:
        return "nothing was pushed before with delta=True"
    if _described(last.tensors) != _described(tensors):
        return "other tensors were pushed before"
    return None


def _changes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a delta's file."""
    changed: dict[str, TensorDelta] = {}
    for name, tensor in new.items():
        result = difference(old[name], tensor)
        if result is not None:
            changed[name] = result[0]
    return tensors_of(changed)
