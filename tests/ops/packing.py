"""Packs the weights that come unpacked in the samples of ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokserve.ops.registry import OPS

PACKING = {  # of the second argument
    "linear": "pack_linear",
    "embedding": "pack_linear",
    "gated_linear": "pack_gated",
    "linear_int8": "pack_linear_int8",
    "gated_linear_int8": "pack_gated_int8",
    "linear_float8": "pack_linear_float8",
    "gated_linear_float8": "pack_gated_float8",
    "linear_wna16": "pack_wna16",
    "gated_linear_wna16": "pack_gated_wna16",
    "embedding_wna16": "pack_wna16",
}
LISTED = {"linear_heads": "pack_linear"}  # of the second, weights packed by themselves
STACKED = {  # of the fourth and sixth, [E,N,K]: an expert's weight is packed by itself
    "experts": ("pack_gated", "pack_linear"),
    "experts_int8": ("pack_gated_int8", "pack_linear_int8"),
    "experts_float8": ("pack_gated_float8", "pack_linear_float8"),
    "experts_wna16": ("pack_gated_wna16", "pack_wna16"),
}


def pack_arguments(op: str, implementation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the weights packed for an implementation of the op."""

    def pack(name: str, weight: Any) -> Any:
        if name.endswith("_wna16") and isinstance(weight, Tensor):
            name = {"pack_wna16": "pack_linear", "pack_gated_wna16": "pack_gated"}[name]
        if isinstance(weight, tuple):  # float8 with its scales
            gated = name == "pack_gated_float8"
            return OPS["pack_scaled_float8"].implementations[implementation].call(*weight, gated)
        return OPS[name].implementations[implementation].call(weight)

    if op in PACKING:
        return (arguments[0], pack(PACKING[op], arguments[1]), *arguments[2:])
    if op in LISTED:
        return (arguments[0], [pack(LISTED[op], weight) for weight in arguments[1]], *arguments[2:])
    if op in STACKED:
        changed = list(arguments)
        for place, name in zip((3, 5), STACKED[op], strict=True):
            changed[place] = [pack(name, weight) for weight in arguments[place]]
        return tuple(changed)
    return arguments


def takes_packed(op: str) -> bool:
    """Whether it has arguments that are packed."""
    return op in PACKING or op in LISTED or op in STACKED
