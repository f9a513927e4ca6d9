"""The experts that were chosen for each cached position, kept in the order of the KV cache's slots.

So what a request finds in the prefix cache comes with its experts, and what it computes again overwrites them with the
same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokserve.base.errors import StartError
from tokserve.layers.protocols import Routing
from tokserve.models.decoder import DecoderSpec
from tokserve.protocol.kv_spec import KVLayout
from tokserve.protocol.plan import StepPlan
from tokserve.runner.tables.slots import Slots


def routing_of(spec: DecoderSpec) -> dict[int, Routing]:
    """How the blocks that have experts choose among them, by number."""
    routings = {number: block.mlp.routing for number, block in enumerate(spec.blocks)}
    return {number: routing for number, routing in routings.items() if routing is not None}


class RoutedTable:
    """`layout`: of the KV cache.  Raises StartError for a model without experts."""

    def __init__(self, spec: DecoderSpec, layout: KVLayout) -> None:
        routings = routing_of(spec)
        if not routings:
            raise StartError("option enable_return_routed_experts: the model has no experts")
        self._layers = np.array(list(routings))  # numbers of the layers with experts
        chosen = max(routing.chosen for routing in routings.values())
        dtype = np.uint8 if max(routing.experts for routing in routings.values()) <= 256 else np.uint16
        self.shape = (len(spec.blocks), chosen)  # of a position's ids; those of layers without experts are 0
        self.position_bytes = len(spec.blocks) * chosen * np.dtype(dtype).itemsize
        rows = layout.num_blocks * layout.block_size
        self._table: NDArray[Any] = np.zeros((rows, len(routings), chosen), dtype)  # memory is taken on first use
        self._block_size = layout.block_size

    def store(self, slot_mapping: Tensor, routed: list[Tensor]) -> None:
        """Keep the ids [T, k] of each layer with experts, of the tokens at `slot_mapping` [T]."""
        rows = slot_mapping.numpy()
        for index, ids in enumerate(routed):
            self._table[rows, index, : ids.shape[1]] = ids.numpy()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Blocks `targets` get what `sources` hold."""
        blocks = self._table.reshape(-1, self._block_size, *self._table.shape[1:])
        blocks[list(targets)] = blocks[list(sources)]

    def results(self, plan: StepPlan, slots: Slots) -> dict[int, NDArray[Any]]:
        """The ids [n, layers, k] of the positions that each plan row has computed; if it enters its slot with this
        plan, of all positions before them too."""
        new = {row.slot for row in plan.new}
        results = {}
        columns = zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist(), strict=True)
        for index, (slot, computed, count) in enumerate(columns):
            positions = np.arange(0 if slot in new else computed, computed + count)
            pages, offsets = np.divmod(positions, self._block_size)
            ids = np.zeros((len(positions), *self.shape), self._table.dtype)
            ids[:, self._layers] = self._table[slots.blocks[slot, pages].astype(np.int64) * self._block_size + offsets]
            results[index] = ids
        return results
