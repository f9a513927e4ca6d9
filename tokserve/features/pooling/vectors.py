"""Pooling: one vector for a request that generates no tokens, or one for each token, from the hidden states of its
prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.models.decoder import Decoder
from tokserve.protocol.params import PoolingParams
from tokserve.protocol.plan import Float32, NewRow, StepPlan
from tokserve.runner.features import RunnerContext, RunnerFeature

PIECE = 256  # rows of hidden states that are added up at a time

Float64 = NDArray[np.float64]


@dataclass(slots=True)
class PooledPrompt:
    """A request: how it is pooled, its length, and what its hidden states so far have come to.  `total`: the sum of
    them, or the one that is wanted; `rows`: those of all tokens, by step."""

    params: PoolingParams
    length: int
    total: Float64
    rows: list[Float32] = field(default_factory=list)


class Pooler(RunnerFeature):
    """The pooled requests by slot."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self._prompts: dict[int, PooledPrompt] = {}

    def assign(self, row: NewRow) -> None:
        self.release(row.slot)
        if isinstance(row.task, PoolingParams):
            self._prompts[row.slot] = PooledPrompt(row.task, row.prompt_len, np.zeros(self._hidden, np.float64))

    def release(self, slot: int) -> None:
        self._prompts.pop(slot, None)

    def needed(self, plan: StepPlan) -> dict[int, int]:
        if not self._prompts:
            return {}
        counts = {}
        for row, slot in enumerate(plan.slots.tolist()):
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            count, computed = int(plan.num_tokens[row]), int(plan.num_computed[row])
            ends = computed + count == prompt.length
            if prompt.params.pooling in ("mean", "all") or (prompt.params.pooling == "first" and not computed):
                counts[row] = count
            elif ends:
                counts[row] = 1
        return counts

    def after(self, model: Decoder, plan: StepPlan, row: int, states: Tensor) -> Float32 | None:
        """The vector of a plan row once its prompt is computed, or the vectors of all tokens one after the other.
        `states` [count, hidden]: as `needed` has said, by `model`, which also classifies."""
        prompt = self._prompts[int(plan.slots[row])]
        params, ends = prompt.params, plan.num_computed[row] + plan.num_tokens[row] == prompt.length
        if params.pooling == "all":
            values = model.classify(states) if params.classify else states.float()
            prompt.rows.append(values.cpu().numpy())
            if not ends:
                return None
            return np.concatenate([_scaled(part, params) for part in prompt.rows]).reshape(-1)
        if params.pooling == "mean":
            prompt.total = added(prompt.total, states.float().cpu().numpy())
        elif params.pooling == "last" or not plan.num_computed[row]:
            state = states[0 if params.pooling == "first" else -1]
            prompt.total = state.double().cpu().numpy()
        if not ends:
            return None
        vector = prompt.total / prompt.length if params.pooling == "mean" else prompt.total
        if params.classify:
            pooled = torch.from_numpy(vector.astype(np.float32)[None]).to(states.device)
            return model.classify(pooled)[0].cpu().numpy()
        return _scaled(vector[None], params)[0]


def added(total: Float64, states: Float32) -> Float64:  # [hidden], [n, hidden] -> [hidden]
    """The sum, row after row, so that it does not depend on the chunks that a prompt is computed in."""
    for first in range(0, len(states), PIECE):
        total = np.add.accumulate(np.vstack([total, states[first : first + PIECE]]), axis=0)[-1]
    return total


def _scaled(vectors: NDArray[np.floating], params: PoolingParams) -> Float32:  # [n, hidden] -> same
    """Scale the vectors to length 1, if the request wants that."""
    if params.normalize and not params.classify:
        exact = vectors.astype(np.float64)
        lengths = np.sqrt(np.array([np.dot(vector, vector) for vector in exact]))[:, None]
        vectors = np.divide(exact, lengths, out=exact, where=lengths > 0)
    return vectors.astype(np.float32)


def make(context: RunnerContext) -> RunnerFeature:
    """The pooled requests of a runner."""
    return Pooler(context.runner.model.spec.hidden)
