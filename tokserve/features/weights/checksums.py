"""Digests of the weights as they lie in memory, in the layout of the bound ops.

Two servers with the same options and the same weights give the same digests; a changed bit changes one.  The walk is
over attributes, so that it includes every tensor of every kind of layer.
"""

from __future__ import annotations

from typing import Any

from tokserve.models.in_place import tensors_of
from tokserve.rl.digests import checksum


def checksums(model: Any) -> dict[str, str]:
    """Path of attributes (`blocks.0.mlp.down.packed`) -> SHA-256 of dtype, shape and bytes, as hex."""
    return {path.removeprefix("."): checksum(tensor) for path, tensor in tensors_of(model)}
