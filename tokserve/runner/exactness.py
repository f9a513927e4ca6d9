"""Asks the kernels at start-up what exactness rests on: that a product's row has the same bits among any others.

A library may choose another order of summation for another number of rows, and a card or a compiler that nobody tried
may surprise.  Takes a second at most; knows nothing of plans or requests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokserve import ops
from tokserve.models.decoder import Decoder

SIZES = (1, 2, 3, 8, 16, 33, 64, 65, 100, 128, 129, 200)  # rows; every tile shape is used
MOST = 300


def unequal_products(model: Decoder) -> list[str]:
    """Names of the first layer's projections, and of the head, whose rows depend on how many there are."""
    block = model.blocks[0]
    named = {"qkv": block.attention.qkv, "out": block.attention.out, "down": block.mlp.down}
    unequal = [name for name, linear in named.items() if not stands_alone(linear, linear.inputs, linear.dtype)]
    head = model.head.linear
    return unequal if stands_alone(model.logits, head.inputs, model.dtype) else [*unequal, "head"]


def stands_alone(product: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype) -> bool:
    """Whether a row has the same bits for all these numbers of rows, first or last among them."""
    rows = torch.randn(MOST, inputs, generator=torch.Generator().manual_seed(0)).to(ops.home, dtype)
    whole = product(rows)
    same = [
        torch.equal(product(rows[:size]), whole[:size]) and torch.equal(product(rows[-size:]), whole[-size:])
        for size in SIZES  # all of them: what is asked here is also compiled here
    ]
    return all(same)
