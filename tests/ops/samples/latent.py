"""Sample inputs of latent attention."""

from __future__ import annotations

import torch

from tests.ops.samples.common import Samples


def linear_heads(dtype: torch.dtype) -> Samples:
    for tokens, heads, wider, columns, rows in ((1, 4, 96, 64, 128), (5, 3, 33, 33, 65), (140, 2, 48, 32, 24)):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, heads, wider, generator=generator).to(dtype)
        weights = torch.randn(heads, rows, columns, generator=generator) / columns**0.5
        yield x, list(weights.to(dtype))


def latent_rope_store(dtype: torch.dtype) -> Samples:
    cases = (  # tokens, heads, plain part of a head, latent, rotated, page, interleaved
        (1, 4, 32, 64, 16, 16, True),
        (9, 3, 24, 40, 8, 5, False),
        (33, 1, 0, 512, 64, 16, True),
        (0, 2, 8, 16, 4, 4, True),
        (6, 2, 10, 34, 2, 4, False),
    )
    for tokens, heads, plain, latent, rotated, page, interleaved in cases:
        generator = torch.Generator().manual_seed(tokens)
        q = torch.randn(tokens, heads, plain + rotated, generator=generator).to(dtype)
        kv = torch.randn(tokens, latent + rotated, generator=generator).to(dtype)
        weight = torch.randn(latent, generator=generator).to(dtype)
        blocks = tokens // page + 2
        cache = torch.randn(blocks, page, latent + rotated, generator=generator).to(dtype)
        slots = torch.randperm(blocks * page, generator=generator)[:tokens]
        table = torch.randn(97, rotated, generator=generator)
        positions = torch.randint(0, 97, (tokens,), generator=generator)
        yield q, kv, weight, 1e-6, table, positions, cache, slots, interleaved


def latent_attention(dtype: torch.dtype) -> Samples:
    cases = (  # rows as (new tokens, total length); heads, latent, rotated, page
        (((1, 1),), 1, 32, 8, 16),
        (((5, 5), (1, 40), (3, 130)), 4, 64, 16, 16),
        (((1, 300), (1, 7), (1, 257)), 16, 128, 32, 16),
        (((40, 300), (20, 20)), 3, 72, 24, 48),
        (((150, 150), (1, 129)), 2, 42, 14, 7),
        (((3, 70), (1, 65)), 80, 96, 16, 16),
    )
    for rows, heads, latent, rotated, page in cases:
        generator = torch.Generator().manual_seed(latent)
        new = torch.tensor([count for count, _ in rows], dtype=torch.int32)
        seq_lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
        blocks = -(-int(seq_lens.max()) // page)
        cache = torch.randn(len(rows) * blocks, page, latent + rotated, generator=generator).to(dtype)
        tables = torch.randperm(len(rows) * blocks, generator=generator).view(len(rows), blocks).int()
        query_start = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()])
        q, q_rope = (
            torch.randn(int(new.sum()), heads, width, generator=generator).to(dtype) for width in (latent, rotated)
        )
        yield q, q_rope, cache, tables, query_start, seq_lens, (latent + rotated) ** -0.5
