"""Sample inputs of products with floating point weights, which come unpacked."""

from __future__ import annotations

import torch

from tests.ops.samples.common import PRODUCTS, Samples, gated_products


def linear(dtype: torch.dtype) -> Samples:
    """Weights come unpacked: the test packs them with the `pack_linear` of the implementation."""
    for tokens, columns, rows in PRODUCTS:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, columns, generator=generator).to(dtype)
        weight = (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)
        bias = torch.randn(rows, generator=generator).to(dtype)
        yield x, weight, None, None
        yield x, weight, bias, None
        yield x, weight, None, torch.float32


def embedding(dtype: torch.dtype) -> Samples:
    """Weights come unpacked, as for `linear`."""
    for tokens, rows, columns in ((1, 64, 64), (5, 130, 33), (70, 7, 192), (0, 3, 2), (4, 1, 1)):
        generator = torch.Generator().manual_seed(tokens)
        weight = torch.randn(rows, columns, generator=generator).to(dtype)
        ids = torch.randint(0, rows, (tokens,), generator=generator)
        yield ids, weight
        yield ids, weight, 8.4375


def gated_linear(dtype: torch.dtype) -> Samples:
    return gated_products(linear(dtype))
