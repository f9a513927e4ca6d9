"""Checks at start-up that products and attention are batch invariant: a row has the same bits whatever is beside it.

A library may choose another order of summation for another number of rows, and not every GPU and compiler has been
tried.  The checks take a second at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokserve import ops
from tokserve.features.lora.layer import LoraSlots, LowRank
from tokserve.layers.batch import Pages
from tokserve.layers.linear import FUSED, GatedLinear, Linear
from tokserve.layers.protocols import AttentionProbe, random_rows
from tokserve.layers.quant import gated
from tokserve.models.decoder import Decoder

SIZES = (1, 2, 3, 8, 16, 33, 64, 65, 100, 128, 129, 200)  # rows; every tile shape is used
MOST = 300
PROMPT, CHUNK = 300, 45  # tokens attention is asked with: more than it takes together, and no multiple of anything
Product = Callable[[Tensor, Tensor], Tensor]  # of rows [n, inputs], and the adapter [n] int32 of each


def unequal_products(model: Decoder) -> list[str]:
    """Names of the projections, of the head, and of what adapters add to such a projection, whose rows depend on how
    many there are, and of gates that do on whether they are fused.  Of projections of one name and size the first is
    checked."""
    linears: dict[tuple[str, int, int], Linear] = {}
    for path, linear in model.named_linears().items():
        linears.setdefault((path.rpartition(".")[2], linear.inputs, linear.outputs), linear)
    unequal = [
        name
        for (name, *_), linear in linears.items()
        if not is_batch_invariant(_plain(linear), linear.inputs, linear.dtype)
    ]
    unequal += [f"the gate of {name}" for (name, *_), linear in linears.items() if not _gates_alike(linear)]
    if not is_batch_invariant(_plain(model.logits), model.spec.hidden, model.dtype):
        unequal.append("head")
    for (name, *_), linear in linears.items():
        if linear.lora is not None and not is_batch_invariant(_adapted(linear.lora), linear.inputs, linear.dtype):
            unequal.append(f"adapters of {name}")
    return unequal


def accept_libraries(model: Decoder) -> list[tuple[int, int]]:
    """Outputs and inputs of the projections whose products of many rows a library may compute: it gives the same bits.
    The head has few rows."""
    kinds = {(linear.outputs, linear.inputs): linear.packed for linear in model.named_linears().values()}
    return [
        kind for kind, packed in kinds.items() if isinstance(packed, ops.PackedWeight) and ops.accept_library(packed)
    ]


def _gates_alike(linear: Linear) -> bool:
    """Whether a gate fused with its product has the bits of both by themselves, as of rows with an adapter."""
    if not isinstance(linear, GatedLinear) or linear.activation not in FUSED:
        return True
    rows = random_rows(0, MOST, linear.inputs).to(ops.torch_device, linear.dtype)
    both = linear.quant.gated_linear(rows, linear.packed, linear.bias, None)
    return torch.equal(linear(rows), gated(both, linear.activation))


def is_batch_invariant(product: Product, inputs: int, dtype: torch.dtype) -> bool:
    """Whether a row has the same bits for all these numbers of rows, first or last among them."""
    rows = random_rows(0, MOST, inputs).to(ops.torch_device, dtype)
    adapters = (torch.arange(1, MOST + 1, device=ops.torch_device) % 3 - 1).int()
    whole = product(rows, adapters)
    same = [
        torch.equal(product(rows[part], adapters[part].clone()), whole[part])
        for size in SIZES  # no early end: the call with each size also compiles its kernel
        for part in (slice(size), slice(-size, None))
    ]
    return all(same)


def unequal_attention(model: Decoder, pages: Pages) -> list[str]:
    """Descriptions of the kinds of attention layers whose decode steps, chunks and whole prompts differ in bits.
    `pages` are the layers' tensors, of which only shapes and types count.  Layers with states are not asked."""
    kinds: dict[tuple[Any, ...], tuple[AttentionProbe, Tensor]] = {}
    for block, (cache, *_) in zip(model.blocks, pages, strict=False):
        if (probe := block.attention.probe()) is not None:
            kinds.setdefault(probe.kind, (probe, cache))
    return [probe.name for probe, cache in kinds.values() if not attends_alike(probe, cache)]


def attends_alike(probe: AttentionProbe, cache: Tensor) -> bool:
    """Whether queries have the same bits in a step, in a chunk and in the whole prompt, another row beside them.
    `cache`: the layer's first tensor, of which only shape and type count."""
    page, device = cache.shape[-2], cache.device
    attention = probe.attend(cache, PROMPT)

    def attend(*spans: tuple[int, int]) -> Tensor:
        counts = torch.tensor([0, *(end - start for start, end in spans)], device=device)
        ends = torch.tensor([end for _, end in spans], dtype=torch.int32, device=device)
        tables = torch.arange(-(-PROMPT // page), dtype=torch.int32, device=device).repeat(len(spans), 1)
        rows = torch.cat([torch.arange(start, end, device=device) for start, end in spans])
        return attention(rows, tables, counts.cumsum(0).int(), ends)

    whole = attend((0, PROMPT))
    step, chunk = attend((PROMPT - 1, PROMPT), (0, 1)), attend((PROMPT - CHUNK, PROMPT), (0, 1))
    return (
        torch.equal(step[0], whole[-1])
        and torch.equal(step[1], whole[0])
        and torch.equal(chunk[:CHUNK], whole[-CHUNK:])
        and torch.equal(chunk[CHUNK], whole[0])
    )


def _plain(product: Callable[[Tensor], Tensor]) -> Product:
    return lambda rows, adapters: product(rows)


def _adapted(like: LoraSlots) -> Product:
    """What two adapters of the largest rank add in slots like these, which are empty at the start."""
    slots = LoraSlots(like.inputs, like.shards, 2, like.rank, like.dtype)
    for slot in range(2):
        for shard, outputs in like.shards.items():
            down, up = (
                random_rows(slot, like.rank, like.inputs) / like.inputs**0.5,
                random_rows(slot + 2, outputs, like.rank),
            )
            slots.place(slot, shard, LowRank(down, up, 1.0))

    def product(rows: Tensor, adapters: Tensor) -> Tensor:
        out = rows.new_zeros(len(rows), sum(like.shards.values()))
        slots.add(out, rows, adapters)
        return out

    return product
