"""Sample inputs of add_lora."""

from __future__ import annotations

import torch

from tests.ops.samples.common import Samples, normal


def add_lora(dtype: torch.dtype) -> Samples:
    shapes: tuple[tuple[int, int, tuple[int, ...], int, int], ...] = (  # rows, inputs, outputs by shard, slots, rank
        (1, 64, (64,), 1, 8),
        (3, 192, (320, 128, 128), 2, 16),
        (17, 96, (40,), 3, 5),
        (7, 33, (17, 1), 4, 20),
        (5, 1030, (70, 70), 2, 3),
        (2, 1, (1,), 1, 1),
        (70, 130, (9, 200), 3, 8),
    )
    for rows, inputs, sizes, slots, rank in shapes:
        shards, outputs = len(sizes), sum(sizes)
        x, wide = normal(dtype, rows, rows, inputs), normal(dtype, 1, rows, outputs + 3)
        down = normal(dtype, 2, slots, shards, rank, inputs) / inputs**0.5
        up = normal(dtype, 3, slots, rank, outputs) / rank**0.5
        adapters = (torch.arange(rows) * 5 // 3 % (slots + 1) - 1).int()
        ranks = (rank - torch.arange(slots * shards) * 2).clamp(min=0).int().view(slots, shards)
        adapters[0] = 0
        scales = (0.5 + torch.arange(slots * shards) * 0.3).view(slots, shards)
        yield wide[:, 1 : 1 + outputs], x, adapters, down, up, ranks, scales, sizes
