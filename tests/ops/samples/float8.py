"""Sample inputs of float8 products, whose weights come unpacked."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.samples.common import Samples

Scaled = tuple[Tensor, Tensor, int]  # values, scales and group, as `pack_scaled_float8` takes them
GROUP = 64


def by_group(weight: Tensor, group: int = GROUP) -> Scaled:
    """The weight [N,K] with a scale of its own for each `group` inputs of each row."""
    rows, columns = weight.shape
    count = -(-columns // group)
    parts = torch.nn.functional.pad(weight.float(), (0, count * group - columns)).view(rows, count, group)
    scales = parts.abs().amax(-1).clamp(min=1e-6) / 448
    values = (parts / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(rows, -1)[:, :columns].contiguous(), scales.t().contiguous(), group if count > 1 else columns


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
        yield x, by_group(weight), bias, None


def gated_linear_float8(dtype: torch.dtype) -> Samples:
    for number, (x, weight, bias, out_dtype) in enumerate(linear_float8(dtype)):
        rows = len(weight[0]) if isinstance(weight, tuple) else len(weight)
        if rows % 2 == 0 and out_dtype is None:
            yield x, weight, bias, ("silu", "gelu_tanh", None)[number % 3]
