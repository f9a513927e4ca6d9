"""Checks at start-up that products are batch invariant: that a row has the same bits whatever rows are beside it.

A library may choose another order of summation for another number of rows, and not every GPU and compiler has been
tried.  The checks take a second at most.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.linear import Linear
from tokserve.layers.lora import LoraSlots, LowRank
from tokserve.models.decoder import Decoder

SIZES = (1, 2, 3, 8, 16, 33, 64, 65, 100, 128, 129, 200)  # rows; every tile shape is used
MOST = 300
Product = Callable[[Tensor, Tensor], Tensor]  # of rows [n, inputs], and the adapter [n] int32 of each


def unequal_products(model: Decoder) -> list[str]:
    """Names of the projections, of the head, and of what adapters add to such a projection, whose rows depend on how
    many there are.  Of projections of one name and size the first is checked."""
    linears: dict[tuple[str, int, int], Linear] = {}
    for path, linear in model.named_linears().items():
        linears.setdefault((path.rpartition(".")[2], linear.inputs, linear.outputs), linear)
    unequal = [
        name for (name, *_), linear in linears.items()
        if not is_batch_invariant(_plain(linear), linear.inputs, linear.dtype)
    ]  # fmt: skip
    if not is_batch_invariant(_plain(model.logits), model.spec.hidden, model.dtype):
        unequal.append("head")
    for (name, *_), linear in linears.items():
        if linear.lora is not None and not is_batch_invariant(_adapted(linear.lora), linear.inputs, linear.dtype):
            unequal.append(f"adapters of {name}")
    return unequal


def is_batch_invariant(product: Product, inputs: int, dtype: torch.dtype) -> bool:
    """Whether a row has the same bits for all these numbers of rows, first or last among them."""
    rows = _random(0, MOST, inputs).to(ops.torch_device, dtype)
    adapters = (torch.arange(1, MOST + 1, device=ops.torch_device) % 3 - 1).int()
    whole = product(rows, adapters)
    same = [
        torch.equal(product(rows[part], adapters[part].clone()), whole[part])
        for size in SIZES  # no early end: the call with each size also compiles its kernel
        for part in (slice(size), slice(-size, None))
    ]
    return all(same)


def _plain(product: Callable[[Tensor], Tensor]) -> Product:
    return lambda rows, adapters: product(rows)


def _adapted(like: LoraSlots) -> Product:
    """What two adapters of the largest rank add in slots like these, which are empty at the start."""
    slots = LoraSlots(like.inputs, like.shards, 2, like.rank, like.dtype)
    for slot in range(2):
        for shard, outputs in like.shards.items():
            down, up = _random(slot, like.rank, like.inputs) / like.inputs**0.5, _random(slot + 2, outputs, like.rank)
            slots.place(slot, shard, LowRank(down, up, 1.0))

    def product(rows: Tensor, adapters: Tensor) -> Tensor:
        out = rows.new_zeros(len(rows), sum(like.shards.values()))
        slots.add(out, rows, adapters)
        return out

    return product


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
