"""Reference of add_lora: the contribution of LoRA adapters to a projection's rows, where rows may have any adapter.

Adapters are in slots, padded to one rank, with a pair of factors for each shard of the projection's outputs; each pair
has a rank and a scale.  A row's bits depend on the row and on its adapter only; a row without adapter is unchanged.
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

    `sizes` divides N into P shards with separate factors: `down` [S,P,R,K], and the shard's columns of `up` [S,R,N].
    ranks[s,p] (int32 [S,P]) rows of a pair are used, none if 0; `scales` is float32 [S,P].  Rows with a negative slot
    are unchanged.  Rows of `out` and x need not be adjacent.  Summed in float32, and added to out in float32 with one
    rounding.  Source: Hu et al. 2021, LoRA.
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
