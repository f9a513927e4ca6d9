"""What low-rank adapters add to a projection's rows, each row by its own adapter or none: one op for all of a batch.

Adapters lie in slots, padded to one rank, and have a pair of factors for each shard of the projection's outputs; the
pair's own rank and scale say how much of it counts.  A row's bits depend on the row and on its adapter only, and a row
without one is not touched.  This file must not know which layer asks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.ops import dense
from tokserve.ops.registry import op


@op(tolerance=dense.TOLERANCE)
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
