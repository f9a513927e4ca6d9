"""Computes the entropy of the distribution that each token was drawn from, before filters.

A value depends on its own row of logits alone, bit for bit: sums are trees of elementwise additions, whose order is
the same whatever the number of rows and threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.protocol.columns import ColumnRows
from tokserve.runner.columns import Int64, SampledLogits

SLICE = 1024  # values that are added to one another first, slice by slice
CHUNK = 1 << 21  # values in float64 that are in memory at once
LEAST = -800.0  # of which exp is 0 in float64


class EntropySource:
    """The entropy of softmax(logits / temperature), in nats; greedy tokens have the temperature 1."""

    num_arrays = 1

    def __init__(self, max_items: int) -> None:
        pass

    def compute(self, sampled: SampledLogits) -> Sequence[Tensor]:
        scaled = sampled.logits / torch.where(sampled.greedy, 1.0, sampled.temperature)[:, None]
        rows = max(1, CHUNK // scaled.shape[1])
        return (torch.cat([entropies_of(chunk) for chunk in torch.split(scaled, rows)]),)

    def rows(self, arrays: Sequence[NDArray[Any]], count: int, index: Int64) -> ColumnRows:
        records = np.zeros((count, 1), np.float32)
        records[index, 0] = arrays[0]
        return ColumnRows(records.view(np.int32))


def entropies_of(logits: Tensor) -> Tensor:
    """float32 [n] of logits [n, V], computed in float64."""
    shifted = (logits - logits.amax(1, keepdim=True)).double()
    weights = shifted.exp()
    total = _row_sum(weights)
    return (total.log() - _row_sum(weights * shifted.clamp_(min=LEAST)) / total).float()


def _row_sum(values: Tensor) -> Tensor:
    """The sums [n] of rows [n, V]."""
    rows, width = values.shape
    slices = torch.nn.functional.pad(values, (0, -width % SLICE)).view(rows, -1, SLICE)
    while (count := slices.shape[1]) > 1:
        halves = slices[:, : count // 2] + slices[:, count // 2 : count // 2 * 2]
        if count % 2:
            halves[:, 0] += slices[:, -1]
        slices = halves
    sums = slices[:, 0]
    while (count := sums.shape[1]) > 1:
        sums = sums[:, : count // 2] + sums[:, count // 2 :]
    return sums[:, 0]
