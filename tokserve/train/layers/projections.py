"""Finds the weights of a transformers model by the server's names, under peft's adapters where there are any.

Modules are looked up at every forward pass, because peft puts its own in their places.  What computes something else
than the server would is refused by name.  Neither transformers nor peft is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokserve.train.adapters import MAX_RANK, lora_a_name, lora_b_name

PEFT_LINEAR = ("peft.tuners.lora.layer", "Linear")


@dataclass(slots=True)
class ModelWeights:
    """`masters`: by the server's names; of an adapter its factors too.  `scales`: of the adapter, by module."""

    masters: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    rank: int = 0  # the adapter's largest


def collect(
    base: nn.Module,
    names: Iterable[str],
    prefix: str,
    device: torch.device,
    renames: Iterable[tuple[str, str]] = (),
) -> ModelWeights:
    """The parameters of `base` that the server calls `prefix` + their name in it.  Raises ValueError, TypeError, also
    for those that are not on a device of this kind.
    `renames`: parts of transformers' names, and what they are in the server's where these differ."""
    weights, renames = ModelWeights(), tuple((old, new) for old, new in renames if new)
    for name in names:
        module, leaf = _module_of(base, name, prefix, renames)
        place = name.rpartition(".")[0]
        kind = type(module)
        if (kind.__module__, kind.__qualname__) == PEFT_LINEAR:
            if leaf == "weight":
                _add_adapter(weights, place, module, device)
            module = cast(nn.Module, module.base_layer)
        elif kind.__module__.split(".")[0] == "peft":
            raise ValueError(f"{place}: the server has no {kind.__qualname__} of peft; it adds LoRA to projections")
        weights.masters[name] = parameter(module, place, leaf, device)
    return weights


def _module_of(base: nn.Module, name: str, prefix: str, renames: tuple[tuple[str, str], ...]) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and the parameter's name in it.  Raises AttributeError."""
    for old, new in renames:
        path, _, leaf = name.replace(new, old, 1).removeprefix(prefix).rpartition(".")
        try:
            return base.get_submodule(path), leaf
        except AttributeError:
            continue  # it is called as the server calls it, or by another of the names
    path, _, leaf = name.removeprefix(prefix).rpartition(".")
    return base.get_submodule(path), leaf


def parameter(module: nn.Module, place: str, leaf: str, device: torch.device) -> Tensor:
    """A module's weight or bias, which must be a whole tensor of floats on this kind of device.  Raises TypeError."""
    tensor = getattr(module, leaf) if hasattr(module, leaf) else None
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{place} is a {type(module).__qualname__} without a {leaf}")
    if isinstance(tensor, DTensor):
        raise TypeError(f"{place}.{leaf} is sharded; shard the whole model as one group (fully_shard(model))")
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise TypeError(f"{place}.{leaf} is {tensor.dtype}: quantized weights are not supported")
    if tensor.device.type != device.type:
        raise TypeError(f"{place}.{leaf} is on {tensor.device}: this exact model computes on {device.type}")
    return tensor


def _add_adapter(weights: ModelWeights, place: str, layer: Any, device: torch.device) -> None:
    """What peft's LoRA layer adds to its base layer now."""
    if layer.disable_adapters:
        if layer.merged:
            layer.unmerge()  # as its own forward pass does
        return
    if layer.merged:
        return
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) > 1:
        raise ValueError(f"{place}: adapters {', '.join(active)} are active together; the server applies one")
    for name in active:
        _check(layer, place, name)
        factors = layer.lora_A[name], layer.lora_B[name]
        weights.masters[lora_a_name(place)], weights.masters[lora_b_name(place)] = (
            parameter(factor, f"{place}.{kind}", "weight", device)
            for factor, kind in zip(factors, ("lora_A", "lora_B"), strict=True)
        )
        weights.scales[place] = float(layer.scaling[name])
        weights.rank = max(weights.rank, len(weights.masters[lora_a_name(place)]))
        if weights.rank > MAX_RANK:
            raise ValueError(f"{place}: the rank of adapter {name} is above {MAX_RANK}")


def _check(layer: Any, place: str, name: str) -> None:
    if name in layer.lora_variant or layer.use_dora.get(name):
        variant = type(layer.lora_variant[name]).__name__ if name in layer.lora_variant else "DoRA"
        raise ValueError(f"{place}: {variant} is not supported; the server adds plain LoRA")
    if layer.lora_bias.get(name):
        raise ValueError(f"{place}: lora_bias is not supported")
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, nn.Dropout) and dropout.p and layer.training:
        raise ValueError(f"{place}: lora_dropout is {dropout.p}; the server drops nothing out: set it to 0.0")
