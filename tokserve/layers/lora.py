"""The low-rank adapters of one projection: weights in slots, padded to one rank, and what they add to its output.

Slots outlive the projection's own weight: a model with other weights is given the same ones.  It must not know what an
adapter is called, nor where its weights come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve import ops


@dataclass(frozen=True, slots=True)
class LowRank:
    """What one adapter adds to one projection: scale * up down."""

    down: Tensor  # [r, inputs]
    up: Tensor  # [outputs, r]
    scale: float


class LoraSlots:
    """`slots` adapters of rank up to `rank` for a projection of these sizes; all are empty at first."""

    def __init__(self, inputs: int, outputs: int, slots: int, rank: int, dtype: torch.dtype) -> None:
        self.inputs, self.outputs = inputs, outputs
        home = ops.home
        self.down = torch.zeros(slots, rank, inputs, dtype=dtype, device=home)
        self.up = torch.zeros(slots, rank, outputs, dtype=dtype, device=home)
        self.ranks = torch.zeros(slots, dtype=torch.int32, device=home)
        self.scales = torch.zeros(slots, dtype=torch.float32, device=home)

    def place(self, slot: int, weights: LowRank | None) -> None:
        """Put an adapter's weights into a slot, in place of what is there; None: it adds nothing here."""
        self.down[slot].zero_()
        self.up[slot].zero_()
        rank = 0 if weights is None else len(weights.down)
        if weights is not None:
            self.down[slot, :rank].copy_(weights.down)
            self.up[slot, :rank].copy_(weights.up.t())
            self.scales[slot] = weights.scale
        self.ranks[slot] = rank

    def add(self, out: Tensor, x: Tensor, adapters: Tensor) -> None:
        """Add to out [T, outputs], made from x [T, inputs], for each row what the adapter in slot adapters[t] adds."""
        ops.add_lora(out, x, adapters, self.down, self.up, self.ranks, self.scales)

    def num_bytes(self) -> int:
        """Memory of all slots."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.down, self.up))
