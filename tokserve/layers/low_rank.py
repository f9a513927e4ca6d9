"""What adapters add to the output of a layer, as the layer sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """What one adapter adds to one shard of a layer: scale * up down."""

    down: Tensor  # [r, inputs]
    up: Tensor  # [outputs, r]
    scale: float


class LayerAdapters(Protocol):
    """The adapters that are served, of one layer."""

    def add(self, out: Tensor, x: Tensor, adapters: Tensor) -> None:
        """Add to out [T, outputs], made from x [T, inputs], for each row what the adapter in slot adapters[t] adds."""

    def trial(self) -> LayerAdapters:
        """Two adapters of the largest rank that can be served, of random weights."""
