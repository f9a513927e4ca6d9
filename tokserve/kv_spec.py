"""What the layers of a model keep in the KV cache, and how much memory that takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one attention layer stores per token: K and V of `heads` x `dim` elements of `dtype`.

    `window` > 0: attention reads only the last `window` tokens.
    """

    heads: int
    dim: int
    dtype: str
    window: int = 0

    def bytes_per_token(self) -> int:
        """Bytes of K plus V for one token of one layer."""
        return 2 * self.heads * self.dim * {"float32": 4, "float8_e4m3fn": 1}.get(self.dtype, 2)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The cache a model needs: a spec per layer, and how many pages of how many tokens there are."""

    specs: tuple[KVSpec, ...]
    num_blocks: int
    block_size: int

    def bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.block_size * sum(spec.bytes_per_token() for spec in self.specs)
