"""Checks at start-up that products and attention are batch invariant: a row has the same bits whatever is beside it.

A library may choose another order of summation for another number of rows, and not every GPU and compiler has been
tried.  The checks take a second or two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.batch import Pages
from tokserve.layers.linear import FUSED, GatedLinear, Linear
from tokserve.layers.low_rank import LayerAdapters
from tokserve.layers.protocols import AttentionProbe, random_rows
from tokserve.layers.quant import gated
from tokserve.models.block import DecoderBlock
from tokserve.models.decoder import Decoder

SIZES = (1, 2, 3, 8, 16, 33, 64, 65, 100, 128, 129, 200)  # rows; every tile shape is used
MOST = 300
PROMPT, CHUNK = 300, 45  # tokens attention is asked with: more than it takes together, and no multiple of anything
LONG = 1500  # tokens of the longest of the ragged rows: more splits than two, more than most windows
ROWS, DRAFTS = 40, 3
Check = Callable[[], bool]
Product = Callable[[Tensor, Tensor], Tensor]  # of rows [n, inputs], and the adapter [n] int32 of each


def unequal_products(model: Decoder) -> list[str]:
    """Names of the checks of `product_checks` that fail."""
    return [name for name, is_equal in product_checks(model) if not is_equal()]


def product_checks(model: Decoder) -> list[tuple[str, Check]]:
    """Whether the rows of a product depend on how many there are and in which order: of the projections, of layers with
    experts, of the head, and of what adapters add to a projection; and whether a gate depends on being fused, or rows
    on what is fused between products.

    Of projections of one name and size, and of layers with experts of one spec, the first is checked.
    """
    linears: dict[tuple[str, int, int], Linear] = {}
    for path, linear in model.named_linears().items():
        linears.setdefault((path.rpartition(".")[2], linear.inputs, linear.outputs), linear)
    named = [(name, linear) for (name, *_), linear in linears.items()]
    checks: list[tuple[str, Check]] = [
        (name, partial(is_batch_invariant, _plain(linear), linear.inputs, linear.dtype)) for name, linear in named
    ]
    checks += [(f"the gate of {name}", partial(_gates_alike, linear)) for name, linear in named]
    if model.implementation == "tokserve":
        specs = [model.spec.blocks[number].mlp for number in model.numbers]
        kinds = dict(zip(specs, model.blocks, strict=True))
        checks += [
            ("experts", partial(is_batch_invariant, _plain(block.mlp), model.spec.hidden, model.dtype))
            for spec, block in kinds.items()
            if spec.has_experts
        ]
        checks += [
            ("norms and products in turn", partial(_turns_alike, block, model.spec.hidden, model.dtype))
            for block in kinds.values()
        ]
    checks.append(("head", partial(is_batch_invariant, _plain(model.logits), model.spec.hidden, model.dtype)))
    return checks + [
        (
            f"adapters of {name}",
            partial(is_batch_invariant, _adapted(linear.lora, linear.outputs), linear.inputs, linear.dtype),
        )
        for name, linear in named
        if linear.lora is not None
    ]


def unsupported(model: Decoder, pages: Pages, errors: tuple[type[Exception], ...]) -> list[str]:
    """The checks that cannot be made because a kernel raises one of `errors`: their names, each with the error."""
    failures = []
    for name, check in [*product_checks(model), *attention_checks(model, pages)]:
        try:
            check()
        except errors as error:
            failures.append(f"{name}: {error}")
    return failures


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


def _turns_alike(block: DecoderBlock, hidden: int, dtype: torch.dtype) -> bool:
    """Whether a norm, the feed-forward layer and a norm, one after the other, have the same bits for few rows and for
    many: what is between two products may be computed with either."""
    rows = random_rows(0, MOST, hidden).to(ops.torch_device, dtype)

    def compute(rows: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = block.mlp_norm.add(rows, rows, block.residual_multiplier)
        return block.mlp_norm.add(block.mlp(x), residual, block.residual_multiplier)

    whole = compute(rows)
    return all(
        torch.equal(one, many[:size])
        for size in (1, min(16, MOST))
        for one, many in zip(compute(rows[:size]), whole, strict=True)
    )


def is_batch_invariant(product: Product, inputs: int, dtype: torch.dtype) -> bool:
    """Whether a row has the same bits for all these numbers of rows, first or last among them, and in another order."""
    rows = random_rows(0, MOST, inputs).to(ops.torch_device, dtype)
    adapters = (torch.arange(1, MOST + 1, device=ops.torch_device) % 3 - 1).int()
    whole = product(rows, adapters)
    mixed = torch.randperm(MOST, generator=torch.Generator().manual_seed(0)).to(ops.torch_device)
    same = [
        torch.equal(product(rows[part], adapters[part].clone()), whole[part])
        for size in SIZES  # no early end: the call with each size also compiles its kernel
        for part in (slice(size), slice(-size, None), mixed[:size])
    ]
    return all(same) and torch.equal(product(rows[mixed], adapters[mixed]), whole[mixed])


def unequal_attention(model: Decoder, pages: Pages) -> list[str]:
    """Names of the checks of `attention_checks` that fail."""
    return [name for name, is_equal in attention_checks(model, pages) if not is_equal()]


def attention_checks(model: Decoder, pages: Pages) -> list[tuple[str, Check]]:
    """Whether decode steps, chunks and whole prompts have the same bits, for each kind of attention layer.  `pages` are
    the layers' tensors, of which only shapes and types count.  Layers with states are not asked."""
    kinds: dict[tuple[Any, ...], tuple[AttentionProbe, Tensor]] = {}
    for block, (cache, *_) in zip(model.blocks, pages, strict=False):
        if (probe := block.attention.probe()) is not None:
            kinds.setdefault(probe.kind, (probe, cache))
    return [(probe.name, partial(attends_alike, probe, cache)) for probe, cache in kinds.values()]


def attends_alike(probe: AttentionProbe, cache: Tensor) -> bool:
    """Whether queries have the same bits in a step, in a chunk, among many ragged rows, and in the whole prompt.
    `cache`: the layer's first tensor, of which only shape and type count."""
    page, device = cache.shape[-2], cache.device
    attention = probe.attend(cache, LONG)

    def attend(*spans: tuple[int, int]) -> Tensor:
        counts = torch.tensor([0, *(end - start for start, end in spans)], device=device)
        ends = torch.tensor([end for _, end in spans], dtype=torch.int32, device=device)
        tables = torch.arange(-(-LONG // page), dtype=torch.int32, device=device).repeat(len(spans), 1)
        rows = torch.cat([torch.arange(start, end, device=device) for start, end in spans])
        return attention(rows, tables, counts.cumsum(0).int(), ends)

    whole, spans = attend((0, LONG)), ragged(LONG)
    ragged_rows = torch.cat([whole[start:end] for start, end in spans])
    if not torch.equal(attend(*spans), ragged_rows):
        return False
    whole = attend((0, PROMPT))
    step, chunk = attend((PROMPT - 1, PROMPT), (0, 1)), attend((PROMPT - CHUNK, PROMPT), (0, 1))
    return (
        torch.equal(step[0], whole[-1])
        and torch.equal(step[1], whole[0])
        and torch.equal(chunk[:CHUNK], whole[-CHUNK:])
        and torch.equal(chunk[CHUNK], whole[0])
    )


def ragged(longest: int) -> list[tuple[int, int]]:
    """First and last position of the queries of ROWS rows of a step, of lengths from 1 to `longest`: most have one
    query, every fifth has drafts behind it, and one is a chunk of a prompt."""
    ends = [1 + row * (longest - 1) // (ROWS - 1) for row in range(ROWS)]
    counts = [CHUNK if row == ROWS // 2 else 1 + DRAFTS * (row % 5 == 4) for row in range(ROWS)]
    return [(max(0, end - count), end) for end, count in zip(ends, counts, strict=True)]


def _plain(product: Callable[[Tensor], Tensor]) -> Product:
    return lambda rows, adapters: product(rows)


def _adapted(like: LayerAdapters, outputs: int) -> Product:
    """What two adapters add to a layer that has adapters like these."""
    trial = like.trial()

    def product(rows: Tensor, adapters: Tensor) -> Tensor:
        out = rows.new_zeros(len(rows), outputs)
        trial.add(out, rows, adapters)
        return out

    return product
