"""What low-rank adapters add to a projection's rows, each row by its own adapter or none: one op for all of a batch.

Adapters lie in slots, padded to one rank, and have a pair of factors for each shard of the projection's outputs; the
pair's own rank and scale say how much of it counts.  A row's bits depend on the row and on its adapter only, and a row
without one is not touched.  This file must not know which layer asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tokserve.ops import dense
from tokserve.ops.registry import normal, op


def _lora_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    shapes: tuple[tuple[int, int, tuple[int, ...], int, int], ...] = (  # rows, inputs, outputs by shard, slots, rank
        (1, 64, (64,), 1, 8),
        (3, 192, (320, 128, 128), 2, 16),
        (17, 96, (40,), 3, 5),
        (7, 33, (17, 1), 4, 20),
        (5, 1030, (70, 70), 2, 3),
        (2, 1, (1,), 1, 1),
        (70, 130, (9, 200), 3, 8),
    )
    for rows, inputs, sizes, slots, rank in shapes:
        shards, outputs = len(sizes), sum(sizes)
        x, wide = normal(dtype, rows, rows, inputs), normal(dtype, 1, rows, outputs + 3)
        down = normal(dtype, 2, slots, shards, rank, inputs) / inputs**0.5
        up = normal(dtype, 3, slots, rank, outputs) / rank**0.5
        adapters = (torch.arange(rows) * 5 // 3 % (slots + 1) - 1).int()
        ranks = (rank - torch.arange(slots * shards) * 2).clamp(min=0).int().view(slots, shards)
        adapters[0] = 0
        scales = (0.5 + torch.arange(slots * shards) * 0.3).view(slots, shards)
        yield wide[:, 1 : 1 + outputs], x, adapters, down, up, ranks, scales, sizes


@op(samples=_lora_samples, tolerance=dense.TOLERANCE)
def add_lora(
    out: Tensor,
    x: Tensor,
    adapters: Tensor,
    down: Tensor,
    up: Tensor,
    ranks: Tensor,
    scales: Tensor,
    sizes: tuple[int, ...],
) -> None:
    """out [T,N] += scale * (x [T,K] times down^T) times up, for row t with those of slot adapters[t] (int32 [T]).

    `sizes` says how N is cut into P shards, each with factors of its own: `down` [S,P,R,K], and in `up` [S,R,N] the
    shard's columns, of which ranks[s,p] (int32 [S,P]) rows are used, 0: nothing is added; `scales` float32 [S,P].  A
    row whose slot is negative is left alone.  Rows of `out` and x may lie apart.  Summed in float32, and added to out
    in float32 with one rounding.  Source: Hu et al. 2021, LoRA.
    """
    first = 0
    for shard, size in enumerate(sizes):
        columns = slice(first, first + size)
        for slot in sorted({slot for slot in adapters.tolist() if slot >= 0}):
            if rank := int(ranks[slot, shard]):
                rows = (adapters == slot).nonzero().flatten()
                factor = dense.pack_linear.reference(down[slot, shard, :rank])
                inner = dense.linear.reference(x[rows], factor, None, torch.float32) * scales[slot, shard]
                factor = dense.pack_linear.reference(up[slot, :rank, columns].t())
                added = dense.linear.reference(inner, factor, None, torch.float32)
                out[rows, columns] = (out[rows, columns].float() + added).to(out.dtype)
        first += size
