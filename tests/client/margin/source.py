"""Computes the value on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokserve.protocol.columns import ColumnRows
from tokserve.runner.columns import Int64, SampledLogits


class MarginSource:
    """The difference of the two largest logits of each row."""

    num_arrays = 1

    def __init__(self, max_items: int) -> None:
        pass

    def compute(self, sampled: SampledLogits) -> Sequence[Tensor]:
        top = sampled.logits.topk(2).values
        return (top[:, 0] - top[:, 1],)

    def rows(self, arrays: Sequence[NDArray[Any]], count: int, index: Int64) -> ColumnRows:
        records = np.zeros((count, 1), np.float32)
        records[index, 0] = arrays[0]
        return ColumnRows(records.view(np.int32))
