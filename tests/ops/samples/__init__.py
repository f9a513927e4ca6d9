"""Sample inputs of the ops, with which tests compare every implementation with its reference.

A module per reference module holds a generator per op, named after it: `linear(dtype)` yields argument tuples.
"""

from __future__ import annotations

import torch

from tests.ops.samples import (
    attention,
    dense,
    elementwise,
    float8,
    gradients,
    latent,
    lora,
    mixture,
    quant,
    recurrent,
    sampling,
    step,
    wna16,
)
from tests.ops.samples.common import Samples

MODULES = (
    attention,
    dense,
    elementwise,
    float8,
    gradients,
    latent,
    lora,
    mixture,
    quant,
    recurrent,
    sampling,
    step,
    wna16,
)


def samples(op: str, dtype: torch.dtype) -> Samples:
    """Argument tuples of the op of this name; none for an op that only packs, which the op that it follows tests."""
    for module in MODULES:
        if generate := getattr(module, op, None):
            yield from generate(dtype)
