"""The launches whose kernels a start on a GPU compiles in parallel, inside `ops.compile_ahead`.

Kernels do not run there, so nothing here may depend on what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch

from tokserve import ops
from tokserve.layers.batch import ForwardBatch, Pages
from tokserve.models.decoder import Decoder
from tokserve.runner import exactness


def launch_all(model: Decoder, kv: Pages, batches: Iterable[ForwardBatch]) -> None:
    """Launch products and attention of all shapes, steps of these batches, and the sampling of most requests."""
    exactness.unequal_products(model)
    exactness.unequal_attention(model, kv)
    if model.implementation == "tokserve":
        for batch in batches:
            model.forward(batch)
    one = torch.ones(1, device=ops.torch_device)
    logits = one.new_zeros(1, model.spec.vocab)
    number, greedy = one.long(), one > 1
    for temperature, k in product((None, one), (-1, 0, 5, 20)):
        ops.sample_fused(logits, number, number, greedy, temperature, temperature is not None, k)
        ops.logprobs(logits, number, max(0, k), None, temperature)
    ops.sample(ops.filter_logits(logits, one.int(), one, one), number, number, greedy)


def token_counts(max_tokens: int) -> list[int]:
    """Numbers of tokens of a step for which a mixture's kernels are compiled: experts get a share, whose size decides
    on their tiles."""
    return sorted({min(1 << bits, max_tokens) for bits in range(6, max_tokens.bit_length() + 1)})


def row_counts(max_rows: int) -> list[int]:
    """Numbers of rows for which kernels are compiled: powers of two from 16 on, and the row of padding."""
    return sorted({min(1 << bits, max_rows) for bits in range(4, max_rows.bit_length() + 1)} | {max_rows + 1})
