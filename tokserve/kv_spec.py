"""What the layers of a model keep in the KV cache, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

ITEM_BYTES = {"float32": 4, "float8_e4m3fn": 1}  # 2 for other dtypes


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one attention layer stores per token: K and V of `heads` x `dim` elements of `dtype`.

    `window` > 0: attention reads only the last `window` tokens.  `kind` says how `shapes` grow: "kv" is pages of keys
    and values, "latent" pages of rows of `dim` elements, from which all heads have both.
    """

    heads: int
    dim: int
    dtype: str
    window: int = 0
    kind: Literal["kv", "latent"] = "kv"

    def shapes(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        """The shape that one block has in each of the layer's tensors, keys first."""
        if self.kind == "latent":
            return ((block_size, self.dim),)
        return ((self.heads, block_size, self.dim),) * 2

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of one layer."""
        return ITEM_BYTES.get(self.dtype, 2) * sum(prod(shape) for shape in self.shapes(block_size))

    def bytes_per_token(self) -> int:
        """Bytes of one token of one layer."""
        return self.block_bytes(1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The cache a model needs: a spec per layer, and how many pages of how many tokens there are."""

    specs: tuple[KVSpec, ...]
    num_blocks: int
    block_size: int

    def bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * sum(spec.block_bytes(self.block_size) for spec in self.specs)
