"""Digests of the weights as they lie in memory, in the layout of the bound ops.

Two servers with the same options and the same weights give the same digests; a changed bit changes one.  The walk is
over attributes, so that it includes every tensor of every kind of layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tokserve.layers.parameter import Parameter
from tokserve.rl.digests import checksum


def checksums(model: Any) -> dict[str, str]:
    """Path of attributes (`blocks.0.mlp.down.packed`) -> SHA-256 of dtype, shape and bytes, as hex."""
    return {path: checksum(tensor) for path, tensor in _tensors(model, "", set())}


def _tensors(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if id(value) in seen or isinstance(value, Parameter):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    for name, child in _children(value):
        yield from _tensors(child, f"{path}.{name}" if path else name, seen)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if type(value).__module__.startswith("tokserve.") and hasattr(value, "__dict__"):
        return list(vars(value).items())
    return []
