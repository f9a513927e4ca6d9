"""Rows of a batch for attention where images have tokens that see each other.

A row of the plan is divided where such an image begins and ends: an image's tokens are a row that attends both ways.
The tokens stay in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokserve.protocol.plan import Int32, StepPlan

Span = tuple[int, int]  # first position of an image, and the one after its last


@dataclass(frozen=True, slots=True)
class DividedRows:
    """`owners`: the plan's row of each row; `counts`: its tokens; `ends`: the position after its last."""

    owners: Int32  # [R]
    counts: Int32  # [R]
    ends: Int32  # [R]
    bidirectional: NDArray[np.bool_]  # [R]

    def last(self, counts: Int32) -> Int32:
        """How many tokens of each row are among the last counts[i] of the plan's row i."""
        total = np.zeros(int(self.owners[-1]) + 1, np.int64)
        np.add.at(total, self.owners, self.counts)
        through = np.cumsum(self.counts) - (np.cumsum(total) - total)[self.owners]  # tokens up to the row's end
        after = total[self.owners] - through
        return np.clip(counts[self.owners] - after, 0, self.counts).astype(np.int32)


def divide(plan: StepPlan, images: Mapping[int, Sequence[Span]]) -> DividedRows | None:
    """The plan's rows; None: none of them computes tokens of an image.  `images`: by slot, ascending."""
    columns = (plan.slots.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist())
    parts: list[tuple[int, int, int, bool]] = []  # row of the plan, first position, end, whether it is an image's
    for row, (slot, at, count) in enumerate(zip(*columns, strict=True)):
        last = at + count
        for start, end in images.get(slot, ()):
            if start < last and at < end:
                parts += [(row, at, start, False)] if at < start else []
                parts.append((row, max(at, start), min(end, last), True))
                at = min(end, last)
        if at < last:
            parts.append((row, at, last, False))
    if not any(part[3] for part in parts):
        return None
    owners, starts, ends, both_ways = (np.array(column) for column in zip(*parts, strict=True))
    return DividedRows(
        owners.astype(np.int32), (ends - starts).astype(np.int32), ends.astype(np.int32), both_ways.astype(np.bool_)
    )
