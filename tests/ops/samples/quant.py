"""Sample inputs of int8 products, whose weights come unpacked."""

from __future__ import annotations

import torch

from tests.ops.samples.common import PRODUCTS, Samples, gated_products, normal


def quantize_rows(dtype: torch.dtype) -> Samples:
    for rows, width, scale in ((1, 64, 1.0), (5, 192, 30.0), (3, 257, 1e-3), (70, 33, 1.0), (2, 1, 1.0)):
        yield (normal(dtype, width, rows, width) * scale,)
    odd = normal(dtype, 9, 7, 40)
    odd[0], odd[1], odd[1, 3] = 0.0, 0.0, 1e-38
    odd[2, 5], odd[3, 39], odd[4, 0] = float("inf"), float("nan"), float("-inf")
    odd[5] = torch.arange(40).to(dtype) + 0.5  # ties, to even
    odd[5, 0] = 127.0
    odd[6] = torch.finfo(dtype).max
    yield (odd,)


def linear_int8(dtype: torch.dtype) -> Samples:
    """Weights come unpacked: the test packs them with the `pack_linear_int8` of the implementation."""
    for tokens, columns, rows in PRODUCTS:
        x, weight, bias = (
            normal(dtype, tokens, tokens, columns) * 3,
            normal(dtype, 1, rows, columns) / columns**0.5,
            normal(dtype, 2, rows),
        )
        x[tokens // 2 :: 9] = 0.0
        yield x, weight, None, None
        yield x, weight, bias, None
        yield x, weight, bias, torch.float32
    x = torch.full((3, 2100), 5.0, dtype=dtype)  # the largest sums there are
    x[1], x[2, 7] = -5.0, float("inf")
    yield x, torch.full((65, 2100), 1.0, dtype=dtype), None, torch.float32


def gated_linear_int8(dtype: torch.dtype) -> Samples:
    return gated_products(linear_int8(dtype))
