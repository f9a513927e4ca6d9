"""Pooling: one vector for a request that generates no tokens, or one for each token, from the hidden states of its
prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.models.decoder import Decoder
from tokserve.protocol.params import PoolingParams
from tokserve.protocol.plan import Float32, NewRow, StepPlan
from tokserve.runner.device import Device, Fetched
from tokserve.runner.features import RunnerContext, RunnerFeature, Vector

PIECE = 256  # rows of hidden states that are added up at a time

Float64 = NDArray[np.float64]


@dataclass(slots=True)
class PooledPrompt:
    """A request: how it is pooled, its length, and what has come of its hidden states so far.  `total`: their sum;
    `rows`: those of all tokens, or of the last step, on their way to the host; `state`: the one that is wanted."""

    params: PoolingParams
    length: int
    total: Float64
    rows: list[Fetched] = field(default_factory=list)
    state: Tensor | None = None  # [hidden] float32

    def add(self, rows: Fetched) -> None:
        """Take the states of one more step, and add up those of the step before, which are here by now."""
        self.fold()
        self.rows.append(rows)

    def fold(self) -> None:
        for rows in self.rows:
            self.total = added(self.total, rows.arrays()[0])
        self.rows.clear()


class Pooler(RunnerFeature):
    """The pooled requests by slot."""

    def __init__(self, hidden: int, device: Device) -> None:
        self._hidden, self._device = hidden, device
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

    def after(self, model: Decoder, plan: StepPlan, row: int, states: Tensor) -> Vector | None:
        """The vector of a plan row once its prompt is computed, or the vectors of all tokens one after the other.
        `states` [count, hidden]: as `needed` has said, by `model`, which also classifies."""
        prompt = self._prompts[int(plan.slots[row])]
        params, ends = prompt.params, plan.num_computed[row] + plan.num_tokens[row] == prompt.length
        if params.pooling == "all":
            prompt.rows.append(self._fetch(model.classify(states) if params.classify else states))
            return partial(_all_vectors, prompt) if ends else None
        if params.pooling == "mean":
            prompt.add(self._fetch(states))
        elif params.pooling == "last" or not plan.num_computed[row]:
            prompt.state = states[0 if params.pooling == "first" else -1].to(torch.float32, copy=True)
        if not ends:
            return None
        if params.classify:
            return self._classified(model, prompt, states.device)
        if prompt.state is None:
            return partial(_mean_vector, prompt)
        fetched = self._fetch(prompt.state[None])
        return lambda: _scaled(fetched.arrays()[0], params)[0]

    def _classified(self, model: Decoder, prompt: PooledPrompt, device: torch.device) -> Vector:
        """The labels' logits of the pooled state; a mean is that of the host, which waits for it."""
        state = prompt.state
        if state is None:
            prompt.fold()
            state = torch.from_numpy((prompt.total / prompt.length).astype(np.float32)).to(device)
        fetched = self._fetch(model.classify(state[None]))
        return lambda: fetched.arrays()[0][0]

    def _fetch(self, rows: Tensor) -> Fetched:
        return self._device.fetch([rows.to(torch.float32, copy=True)])


def _all_vectors(prompt: PooledPrompt) -> Float32:
    return np.concatenate([_scaled(part.arrays()[0], prompt.params) for part in prompt.rows]).reshape(-1)


def _mean_vector(prompt: PooledPrompt) -> Float32:
    prompt.fold()
    return _scaled((prompt.total / prompt.length)[None], prompt.params)[0]


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
    return Pooler(context.runner.model.spec.hidden, context.runner.backend.device)
