"""Sample inputs of the ops that prepare a step on a device."""

from __future__ import annotations

import torch

from tests.ops.samples.common import Samples


def edit_rows(dtype: torch.dtype) -> Samples:
    for slots, width, count in ((1, 1, 1), (5, 40, 3), (3, 3000, 2), (2, 9, 0)):
        table = torch.arange(slots * width, dtype=dtype).view(slots, width)
        lengths = [(7 * edit + width) % (width + 1) for edit in range(count)]
        edits = [
            (edit % slots, (width - length) // 2, sum(lengths[:edit]), length) for edit, length in enumerate(lengths)
        ]
        values = -torch.arange(sum(lengths) + 1, dtype=dtype)
        yield table, torch.tensor(edits, dtype=torch.int32).view(count, 4), values


def prepare_step(dtype: torch.dtype) -> Samples:
    for page, context, rows in ((4, 50, [(3, 0, 1)]), (16, 2500, [(1, 3, 2100), (0, 2499, 1), (2, 0, 17), (4, 8, 1)])):
        width = -(-context // page)
        tokens = torch.arange(5 * context, dtype=dtype).view(5, context)
        blocks = torch.arange(5 * width, dtype=dtype).flip(0).view(5, width)
        slots, computed, counts = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
        starts = torch.tensor([0, *counts.tolist()]).cumsum(0).int()
        total = int(starts[-1])
        longs = (torch.zeros(total, dtype=torch.int64) for _ in range(3))
        yield (
            tokens,
            blocks,
            slots,
            computed,
            starts,
            page,
            *longs,
            torch.zeros_like(slots),
            torch.zeros(len(rows), width, dtype=dtype),
        )


def advance_step(dtype: torch.dtype) -> Samples:
    """The last row is padding."""
    for page, context, rows in ((4, 50, [(3, 0)]), (16, 2500, [(1, -1), (0, 2498), (3, 15), (2, 14), (4, 7)])):
        width = -(-context // page)
        tokens = torch.arange(5 * context, dtype=dtype).view(5, context)
        blocks = torch.arange(5 * width, dtype=dtype).flip(0).view(5, width)
        slots, computed = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
        longs = (torch.zeros(len(rows), dtype=torch.int64) for _ in range(4))
        yield (
            tokens,
            blocks,
            slots,
            computed,
            page,
            *longs,
            torch.zeros_like(slots),
            torch.zeros(len(rows), width, dtype=dtype),
        )
