"""Sample inputs of gradients."""

from __future__ import annotations

from itertools import accumulate

import torch

from tests.ops.samples.common import PRODUCTS, Samples, normal

BY_TORCH = {"sum_rows", "softmax", "layer_norm_gradients", "row_products", "route_gradients"}  # on a CPU
BY_TORCH |= {"expert_products", "expert_weight_gradients"}


def matrix_product(dtype: torch.dtype) -> Samples:
    """Plain operands, and transposes of contiguous ones."""
    for rows, depth, columns in (*PRODUCTS, (0, 8, 3)):
        yield normal(dtype, 1, rows, depth), normal(dtype, 2, depth, columns)
        yield normal(dtype, 3, depth, rows).t(), normal(dtype, 4, depth, columns), torch.float32
        yield normal(dtype, 5, rows, depth), normal(dtype, 6, columns, depth).t(), torch.float32


def sum_rows(dtype: torch.dtype) -> Samples:
    for count, width, places in ((1, 8, 3), (40, 33, 7), (5, 64, 30), (0, 8, 3)):
        generator = torch.Generator().manual_seed(width)
        yield normal(dtype, 1, count, width), torch.randint(0, places, (count,), generator=generator), places


def softmax(dtype: torch.dtype) -> Samples:
    for rows, width in ((1, 7), (3, 320), (2, 5000), (0, 8)):
        x = 4.0 * normal(dtype, width, rows, width)
        x[:, 2:5] = float("-inf")
        yield (x,)


SORTED = (  # rows of experts, inputs, outputs
    ((1,), 64, 33),
    ((3, 0, 9, 1), 33, 40),
    ((0, 5, 0), 70, 24),
    ((140, 2, 33), 40, 24),
    ((0, 0), 8, 8),
)


def expert_products(dtype: torch.dtype) -> Samples:
    for number, (counts, inputs, outputs) in enumerate(SORTED):
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        x = normal(dtype, number, sum(counts), inputs)
        weights = normal(dtype, 5, len(counts), inputs, outputs) / inputs**0.5
        yield x, list(weights), starts, False
        yield x, list(weights.transpose(1, 2).contiguous()), starts, True, torch.float32


def expert_weight_gradients(dtype: torch.dtype) -> Samples:
    for number, (counts, inputs, outputs) in enumerate(SORTED):
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        rows = sum(counts)
        yield normal(dtype, number, rows, outputs), normal(dtype, 7, rows, inputs) / max(1, rows) ** 0.5, starts


def row_products(dtype: torch.dtype) -> Samples:
    for rows, width in ((1, 7), (5, 320), (2, 5000), (0, 8)):
        yield normal(dtype, 1, rows, width), normal(dtype, 2, rows, width)
        yield normal(torch.float32, 1, rows, width), normal(dtype, 3, rows, width)


def route_gradients(dtype: torch.dtype) -> Samples:
    for tokens, count, k in ((1, 8, 2), (5, 64, 8), (17, 60, 4), (40, 32, 1), (0, 4, 2), (3, 3, 3)):
        logits, grad = normal(dtype, tokens, tokens, count), normal(dtype, 1, tokens, k)
        ids = logits.sort(dim=-1, descending=True).indices[:, :k].int().contiguous()
        for sigmoid in (False, True):
            yield grad, logits, ids, sigmoid, True, 0.0, 1.0
            yield grad, logits, ids, sigmoid, True, 1e-2, 2.5
            yield grad, logits, ids, sigmoid, False, 0.0, 16.0


def activation_gradients(dtype: torch.dtype) -> Samples:
    for rows, width in ((1, 64), (5, 33), (70, 128), (0, 8)):
        for name in ("silu", "gelu_tanh", "gelu", "relu", "relu2"):
            x = 3.0 * normal(torch.float32, width, rows, 2 * width)
            yield normal(dtype, 1, rows, width), x.to(dtype), name, True
            yield normal(dtype, 1, rows, 2 * width), x.to(dtype), name


def norm_gradients(dtype: torch.dtype) -> Samples:
    for rows, width in ((1, 64), (5, 33), (300, 128), (2, 1030), (0, 8)):
        x, weight = 3.0 * normal(torch.float32, width, rows, width), normal(torch.float32, 2, width)
        yield normal(dtype, 1, rows, width), x.to(dtype), weight, 1e-5
        yield normal(torch.float32, 1, rows, width), x.to(dtype), weight, 1e-5, normal(dtype, 3, rows, width)


def layer_norm_gradients(dtype: torch.dtype) -> Samples:
    for grad, x, *rest in norm_gradients(dtype):
        yield grad, x + 2.0, *rest


def attention_gradients(dtype: torch.dtype) -> Samples:
    cases = (  # nodes as (parent or -1, tokens); query heads, KV heads, head dim, window, softcap
        (((-1, 1),), 1, 1, 32, 0, 0.0),
        (((-1, 5), (0, 3), (0, 40), (-1, 7)), 4, 2, 64, 0, 0.0),
        (((-1, 70), (0, 65), (1, 9), (0, 1)), 6, 2, 80, 37, 0.0),
        (((-1, 150), (-1, 33)), 3, 1, 33, 0, 2.0),
        (((-1, 290),), 2, 2, 128, 9, 0.0),
        ((), 2, 1, 8, 0, 0.0),
    )
    for nodes, heads, kv_heads, dim, window, softcap in cases:
        generator = torch.Generator().manual_seed(dim)
        starts = [0, *accumulate(count for _, count in nodes)]
        paths: list[list[int]] = []
        for number, (parent, count) in enumerate(nodes):
            before = paths[parent] if parent >= 0 else []
            paths.append([*before, *range(starts[number], starts[number] + count)])
        grad, q = torch.randn(2, starts[-1], heads, dim, generator=generator).to(dtype).unbind()
        k, v = torch.randn(2, starts[-1], kv_heads, dim, generator=generator).to(dtype).unbind()
        path_start = torch.tensor([0, *accumulate(len(path) for path in paths)])
        flat = torch.tensor([token for path in paths for token in path], dtype=torch.int64)
        yield grad, q, k, v, torch.tensor(starts), flat, path_start, dim**-0.5, window, softcap
