"""Pooling: one vector for a request that generates no tokens, from the hidden states of its prompt."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.models.decoder import Decoder
from tokserve.params import PoolingParams
from tokserve.plan import Float32, NewRow, StepPlan

PIECE = 256  # rows of hidden states that are added up at a time

Float64 = NDArray[np.float64]


class Pooler:
    """By slot, how its request is pooled and the sum of its hidden states so far."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self._params: dict[int, tuple[PoolingParams, int]] = {}  # and the prompt's length
        self._sums: dict[int, Float64] = {}

    def assign(self, row: NewRow) -> None:
        """A request takes a slot."""
        self.release(row.slot)
        if isinstance(row.task, PoolingParams):
            self._params[row.slot] = (row.task, row.prompt_len)
            self._sums[row.slot] = np.zeros(self._hidden, np.float64)

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._params.pop(slot, None)
        self._sums.pop(slot, None)

    def needed(self, plan: StepPlan) -> dict[int, int]:
        """Plan row -> of how many of its last positions the hidden states are needed."""
        if not self._params:
            return {}
        counts = {}
        for row, slot in enumerate(plan.slots.tolist()):
            if slot in self._params:
                params, prompt_len = self._params[slot]
                count = int(plan.num_tokens[row])
                if params.pooling == "mean":
                    counts[row] = count
                elif plan.num_computed[row] + count == prompt_len:
                    counts[row] = 1
        return counts

    def pool(self, model: Decoder, plan: StepPlan, row: int, states: Tensor) -> Float32 | None:
        """The vector of a plan row once its prompt is computed.  `states` [count, hidden]: as `needed` has said, by
        `model`, which also classifies."""
        slot = int(plan.slots[row])
        params, prompt_len = self._params[slot]
        vector = self._add(slot, states.float().cpu().numpy())
        if plan.num_computed[row] + plan.num_tokens[row] < prompt_len:
            return None
        if params.pooling == "mean":
            vector = vector / prompt_len
        if params.classify:
            pooled = torch.from_numpy(vector.astype(np.float32)[None]).to(states.device)
            logits: Float32 = model.classify(pooled)[0].cpu().numpy()
            return logits
        norm = np.sqrt(np.dot(vector, vector))
        return (vector / norm if params.normalize and norm > 0 else vector).astype(np.float32)

    def _add(self, slot: int, states: Float32) -> Float64:
        """Add row after row, so that the sum does not depend on the chunks that a prompt is computed in."""
        total = self._sums[slot]
        for first in range(0, len(states), PIECE):
            total = np.add.accumulate(np.vstack([total, states[first : first + PIECE]]), axis=0)[-1]
        self._sums[slot] = total
        return total
