"""Features of running requests: embeddings that take the place of placeholder ids in a forward pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokserve.plan import NewRow, StepPlan
from tokserve.prompt import Feature


class FeatureTable:
    """By slot, the embeddings of its request's features, of `hidden` numbers each."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._by_slot: dict[int, list[tuple[int, Tensor]]] = {}  # start, and embeddings [length, hidden]

    def assign(self, row: NewRow) -> None:
        """A request takes a slot; its features were checked at admission."""
        self.release(row.slot)
        if row.features:
            self._by_slot[row.slot] = [(feature.start, self._embeddings(feature)) for feature in row.features]

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._by_slot.pop(slot, None)

    def _embeddings(self, feature: Feature) -> Tensor:
        data = np.frombuffer(feature.data, "<f4").astype(np.float32).reshape(feature.length, self._hidden)
        return torch.from_numpy(data).to(self._device, self._dtype)

    def embeds(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Indices of tokens in the plan's batch [m] int64 and their embeddings [m, hidden]; None if there are none."""
        if not self._by_slot:
            return None
        index, embeddings = [], []
        begin = 0  # of the row in the batch
        columns = (plan.slots.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist())
        for slot, computed, count in zip(*columns, strict=True):
            for start, rows in self._by_slot.get(slot, ()):
                first, last = max(start, computed), min(start + len(rows), computed + count)
                if first < last:
                    index.append(torch.arange(begin + first - computed, begin + last - computed))
                    embeddings.append(rows[first - start : last - start])
            begin += count
        return (torch.cat(index).to(self._device), torch.cat(embeddings)) if index else None
