"""What low-rank adapters add to a projection's rows, each row by its own adapter or none: one op for all of a batch.

Adapters lie in slots, padded to one rank; a slot's rank and scale say how much of it counts.  A row's bits depend on
the row and on its adapter only, and a row without one is not touched.  This file must not know which layer asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tokserve.ops.linear import TOLERANCE
from tokserve.ops.linear import linear as linear_op
from tokserve.ops.linear import pack_linear as pack_linear_op
from tokserve.ops.registry import op


def _random(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _lora_samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    shapes = (  # rows, inputs, outputs, slots, rank
        (1, 64, 64, 1, 8),
        (3, 192, 576, 2, 16),
        (17, 96, 40, 3, 5),
        (7, 33, 17, 4, 20),
        (5, 1030, 70, 2, 3),
        (2, 1, 1, 1, 1),
        (70, 130, 200, 3, 8),
    )
    for rows, inputs, outputs, slots, rank in shapes:
        x, wide = _random(dtype, rows, rows, inputs), _random(dtype, 1, rows, outputs + 3)
        down = _random(dtype, 2, slots, rank, inputs) / inputs**0.5
        up = _random(dtype, 3, slots, rank, outputs) / rank**0.5
        adapters = (torch.arange(rows) * 5 // 3 % (slots + 1) - 1).int()
        ranks = (rank - torch.arange(slots) * 2).clamp(min=0).int()
        adapters[0] = 0
        scales = 0.5 + torch.arange(slots) * 0.3
        yield wide[:, 1 : 1 + outputs], x, adapters, down, up, ranks, scales


@op(samples=_lora_samples, tolerance=TOLERANCE)
def add_lora(out: Tensor, x: Tensor, adapters: Tensor, down: Tensor, up: Tensor, ranks: Tensor, scales: Tensor) -> None:
    """out [T,N] += scale * (x [T,K] times down^T) times up, for row t with those of slot adapters[t] (int32 [T]).

    `down` [S,R,K], `up` [S,R,N]: zero from ranks[s] on; `ranks` int32 [S], 0: nothing is added; `scales` float32
    [S].  A row whose slot is negative is left alone.  Rows of `out` and x may lie apart.  Summed in float32, and added
    to out in float32 with one rounding.  Source: Hu et al. 2021, LoRA.
    """
    for slot in sorted(set(adapters.tolist())):
        rank = int(ranks[slot]) if slot >= 0 else 0
        if rank:
            rows = (adapters == slot).nonzero().flatten()
            inner = linear_op.reference(x[rows], pack_linear_op.reference(down[slot, :rank]), None, torch.float32)
            inner = inner * scales[slot]
            added = linear_op.reference(inner, pack_linear_op.reference(up[slot, :rank].t()), None, torch.float32)
            out[rows] = (out[rows].float() + added).to(out.dtype)
