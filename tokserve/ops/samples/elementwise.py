"""Sample inputs of norms, rotary embedding and gated activations."""

from __future__ import annotations

import torch

from tokserve.ops.samples.common import Samples, normal


def rms_norm(dtype: torch.dtype) -> Samples:
    for rows, width, scale in (
        (1, 64, 1.0),
        (5, 192, 30.0),
        (3, 257, 1e-3),
        (70, 128, 1.0),
        (2, 4096, 3.0),
        (4, 1, 1.0),
    ):
        yield normal(dtype, width, rows, width) * scale, normal(dtype, width + 1, width), 1e-6
    yield torch.zeros(2, 96, dtype=dtype), torch.ones(96, dtype=dtype), 1e-5


def add_rms_norm(dtype: torch.dtype) -> Samples:
    for x, weight, eps in rms_norm(dtype):
        yield x, normal(dtype, 7, *x.shape), weight, eps


def rope(dtype: torch.dtype) -> Samples:
    for tokens, heads, kv_heads, dim, rot in (
        (1, 4, 2, 64, 64),
        (7, 3, 1, 32, 16),
        (33, 8, 8, 80, 32),
        (2, 2, 1, 128, 128),
    ):
        angles = torch.arange(97.0)[:, None] * (10000.0 ** (-torch.arange(rot // 2) * 2.0 / rot))
        table = torch.cat([angles.cos(), angles.sin()], -1)
        positions = torch.randint(0, 97, (tokens,), generator=torch.Generator().manual_seed(tokens))
        yield normal(dtype, 1, tokens, heads, dim), normal(dtype, 2, tokens, kv_heads, dim), table, positions


def silu_mul(dtype: torch.dtype) -> Samples:
    for rows, width in ((1, 512), (5, 33), (70, 128), (3, 1)):
        yield (normal(dtype, width, rows, 2 * width) * 4,)
    yield (torch.tensor([[-200.0, -20.0, 0.0, 20.0, 200.0, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype),)


gelu_mul = silu_mul
