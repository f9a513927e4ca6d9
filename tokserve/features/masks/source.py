"""Computes sampling masks on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokserve import ops
from tokserve.features.masks.columns import mask_rows
from tokserve.protocol.columns import ColumnRows
from tokserve.protocol.params import WHOLE_VOCABULARY
from tokserve.runner.columns import Int64, SampledLogits


class MaskSource:
    """`max_items`: the most ids of a mask."""

    num_arrays = 4

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items

    def compute(self, sampled: SampledLogits) -> Sequence[Tensor]:
        """Numbers of ids, the ids, the logprobs of all ids and of the tokens among them, as the op returns them."""
        return ops.sampling_mask(
            sampled.logits, sampled.processed, sampled.token_ids, sampled.greedy, sampled.temperature, self._max_items
        )

    def rows(self, arrays: Sequence[NDArray[Any]], count: int, index: Int64) -> ColumnRows:
        """Rows of tokens that did not ask count as the whole vocabulary."""
        counts, ids, kept, values = arrays
        ids = ids[: np.maximum(counts, 0).sum()]
        if len(index) == count:
            return mask_rows(counts, ids, values, kept)
        none = np.zeros(count, np.float32)
        rows = mask_rows(np.full(count, WHOLE_VOCABULARY, np.int32), ids, none, none)
        rows.records[index] = mask_rows(counts, ids, values, kept).records
        return rows
