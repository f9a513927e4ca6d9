"""The low-rank adapters of one layer: weights in slots, padded to one rank, and what they add to its output.

Slots outlive the layer's weight: a model with other weights is given the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.low_rank import LowRank
from tokserve.layers.protocols import random_rows


class LoraSlots:
    """`slots` adapters of rank up to `rank` for a layer of these sizes; all are empty at first.  `shards`: as the
    layer's, names to numbers of output features in the order of the output."""

    def __init__(self, inputs: int, shards: Mapping[str, int], slots: int, rank: int, dtype: torch.dtype) -> None:
        self.inputs, self.shards, self.rank, self.dtype = inputs, dict(shards), rank, dtype
        self._sizes, device = tuple(shards.values()), ops.torch_device
        self._down = torch.zeros(slots, len(shards), rank, inputs, dtype=dtype, device=device)
        self._up = torch.zeros(slots, rank, sum(self._sizes), dtype=dtype, device=device)
        self._ranks = torch.zeros(slots, len(shards), dtype=torch.int32, device=device)
        self._scales = torch.zeros(slots, len(shards), dtype=torch.float32, device=device)

    def place(self, slot: int, shard: str, weights: LowRank | None) -> None:
        """Put what an adapter adds to a shard into a slot, in place of what is there; None: it adds nothing here."""
        number = list(self.shards).index(shard)
        first = sum(self._sizes[:number])
        down, up = self._down[slot, number], self._up[slot, :, first : first + self._sizes[number]]
        down.zero_()
        up.zero_()
        rank = 0 if weights is None else len(weights.down)
        if weights is not None:
            down[:rank].copy_(weights.down)
            up[:rank].copy_(weights.up.t())
        self._scales[slot, number] = 0.0 if weights is None else weights.scale
        self._ranks[slot, number] = rank

    def add(self, out: Tensor, x: Tensor, adapters: Tensor) -> None:
        """Add to out [T, outputs], made from x [T, inputs], for each row what the adapter in slot adapters[t] adds."""
        ops.add_lora(out, x, adapters, self._down, self._up, self._ranks, self._scales, self._sizes)

    def trial(self) -> LoraSlots:
        """Slots like these with two adapters of the largest rank, of random weights."""
        slots = LoraSlots(self.inputs, self.shards, 2, self.rank, self.dtype)
        for slot in range(2):
            for shard, outputs in self.shards.items():
                down = random_rows(slot, self.rank, self.inputs) / self.inputs**0.5
                slots.place(slot, shard, LowRank(down, random_rows(slot + 2, outputs, self.rank), 1.0))
        return slots

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._down, self._up))
