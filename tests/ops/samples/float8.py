"""Sample inputs of float8 products, whose weights come unpacked."""

from __future__ import annotations

import torch

from tests.ops.samples.common import Samples


def linear_float8(dtype: torch.dtype) -> Samples:
    """Weights come unpacked: the test packs them with the `pack_linear_float8` of the implementation."""
    for tokens, columns, rows in ((1, 64, 64), (3, 192, 576), (17, 512, 192), (70, 96, 40), (2, 33, 17), (5, 1000, 3)):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, columns, generator=generator).to(dtype)
        weight = (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)
        bias = torch.randn(rows, generator=generator).to(dtype)
        x[tokens // 2 :: 9] = 0.0
        yield x, weight, None, None
        yield x, weight, bias, torch.float32
