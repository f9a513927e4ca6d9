"""Sample inputs of norms, residual additions, rotary embedding and activations."""

from __future__ import annotations

import torch

from tests.ops.samples.common import Samples, normal


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
    yield normal(dtype, 8, 3, 70), normal(dtype, 9, 3, 70), normal(dtype, 10, 70), 1e-5, 0.22


def layer_norm(dtype: torch.dtype) -> Samples:
    for number, (x, weight, eps) in enumerate(rms_norm(dtype)):
        shifted = x + 0.5 * x.float().abs().max().to(dtype)
        yield shifted, weight, normal(dtype, 6, len(weight)) if number % 2 else None, eps


def add_layer_norm(dtype: torch.dtype) -> Samples:
    for x, weight, bias, eps in layer_norm(dtype):
        yield x, normal(dtype, 7, *x.shape), weight, bias, eps
    yield normal(dtype, 8, 3, 70), normal(dtype, 9, 3, 70), normal(dtype, 10, 70), None, 1e-5, 0.22


def add_residual(dtype: torch.dtype) -> Samples:
    for number, (rows, width) in enumerate(((1, 64), (5, 33), (70, 128), (3, 1), (0, 8))):
        yield normal(dtype, width, rows, width), normal(dtype, 7, rows, width), (1.0, 0.22, -3.0)[number % 3]


def cap(dtype: torch.dtype) -> Samples:
    for number, (rows, width) in enumerate(((1, 64), (5, 33), (70, 128), (3, 1), (0, 8), (2, 5000))):
        yield normal(dtype, width, rows, width) * 20, (1.0, 0.22, 3.0)[number % 3], (30.0, 0.0)[number % 2]
    yield torch.tensor([[-1e4, -1.0, -1e-4, 0.0, 1e-4, 0.6, 1.0, 1e4]]).to(dtype), 1.0, 1.0


def scale_by_position(dtype: torch.dtype) -> Samples:
    for tokens, heads, dim, period, first in (
        (1, 4, 64, 16, 0),
        (9, 3, 33, 7, 1),
        (70, 2, 80, 1000, 0),
        (0, 2, 8, 4, 1),
    ):
        positions = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(tokens))
        yield normal(dtype, dim, tokens, heads, dim), positions, 0.1, period, first


def scale_rows(dtype: torch.dtype) -> Samples:
    for rows, width, factors in ((1, 64, 1), (5, 33, 5), (70, 128, 70), (3, 5000, 1), (0, 8, 0)):
        yield normal(dtype, width, rows, width), normal(torch.float32, rows, factors)


def norm_values(dtype: torch.dtype) -> Samples:
    for rows, width, heads, dim in ((1, 128, 1, 64), (5, 99, 3, 33), (70, 640, 2, 80), (3, 24, 4, 6), (0, 16, 1, 8)):
        x = normal(dtype, width, rows, width) * 3
        yield x, heads, dim, 1e-6
        yield x, heads, dim, 1e-6, True


def gate_inputs(dtype: torch.dtype) -> Samples:
    for activation in ("silu", "gelu_tanh", "gelu", "relu", "relu2"):
        for rows, width, layer in ((1, 64, 0), (5, 33, 2), (3, 1, 1)):
            yield normal(dtype, width, rows, width) * 4, normal(dtype, 7, rows, 3 * width), layer, activation


def activate(dtype: torch.dtype) -> Samples:
    for activation in ("silu", "gelu_tanh", "gelu", "relu", "relu2"):
        for (x,) in silu_mul(dtype):
            yield x, activation
            yield x, activation, True


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
        q, k = normal(dtype, 1, tokens, heads, dim), normal(dtype, 2, tokens, kv_heads, dim)
        yield q, k, table, positions
        yield q, k, table, positions, True


def silu_mul(dtype: torch.dtype) -> Samples:
    for rows, width in ((1, 512), (5, 33), (70, 128), (3, 1)):
        yield (normal(dtype, width, rows, 2 * width) * 4,)
    yield (torch.tensor([[-200.0, -20.0, 0.0, 20.0, 200.0, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype),)


gelu_mul = silu_mul
