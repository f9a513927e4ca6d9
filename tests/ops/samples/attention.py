"""Sample inputs of attention and of the stores into the KV cache."""

from __future__ import annotations

import torch

from tests.ops.samples.common import Samples


def slots_in_runs(tokens: int, page: int, blocks: int, generator: torch.Generator) -> torch.Tensor:  # [tokens] int64
    """Slots in runs of up to seven that may begin anywhere in a page and cross into the next."""
    runs = torch.split(torch.arange(blocks * page), 7)
    return torch.cat([runs[i] for i in torch.randperm(len(runs), generator=generator)])[:tokens]


def store_kv(dtype: torch.dtype) -> Samples:
    for tokens, heads, dim, page in ((1, 2, 64, 16), (9, 1, 32, 5), (0, 2, 8, 4), (61, 2, 44, 16)):
        generator = torch.Generator().manual_seed(tokens)
        k, v = torch.randn(2, tokens, heads, dim, generator=generator).to(dtype).unbind()
        caches = torch.randn(2, 6, heads, page, dim, generator=generator).to(dtype)
        yield k, v, caches[0], caches[1], slots_in_runs(tokens, page, 6, generator)


def store_rows(dtype: torch.dtype) -> Samples:
    for tokens, width, page in ((1, 64, 16), (9, 33, 5), (0, 8, 4), (61, 44, 16)):
        generator = torch.Generator().manual_seed(tokens)
        rows = torch.randn(tokens, width, generator=generator).to(dtype)
        pages = torch.randn(14, page, width, generator=generator).to(dtype)
        yield rows, pages, torch.randperm(14 * page, generator=generator)[:tokens]


def norm_rope_store(dtype: torch.dtype) -> Samples:
    cases = (  # tokens, query heads, KV heads, head dim, rotated, page, norms; interleaved, norms last
        (1, 4, 2, 64, 64, 16, "head", False, False),
        (9, 3, 1, 32, 16, 5, "head", False, False),
        (33, 8, 8, 80, 32, 16, "", False, False),
        (5, 2, 1, 128, 128, 1, "head", False, False),
        (2, 1, 1, 6, 2, 4, "head", False, False),
        (0, 2, 1, 8, 8, 4, "", False, False),
        (9, 4, 2, 40, 20, 16, "", True, False),
        (3, 4, 2, 36, 36, 16, "head", True, False),
        (7, 3, 3, 24, 24, 16, "all", False, False),
        (5, 4, 2, 20, 12, 16, "head", False, True),
        (75, 2, 2, 36, 0, 64, "", False, False),
    )
    for tokens, heads, kv_heads, dim, rot, page, norms, interleaved, norm_last in cases:
        generator = torch.Generator().manual_seed(tokens)
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
        widths = [dim * count if norms == "all" else dim for count in (heads, kv_heads)]
        weights = [torch.randn(width, generator=generator).to(dtype) if norms else None for width in widths]
        blocks = tokens // page + 2
        caches = torch.randn(2, blocks, kv_heads, page, dim, generator=generator).to(dtype)
        table = torch.randn(97, rot, generator=generator)
        positions = torch.randint(0, 97, (tokens,), generator=generator)
        slots = slots_in_runs(tokens, page, blocks, generator)
        arguments = (qkv, *weights, 1e-6, table, positions, caches[0], caches[1], slots)
        yield (*arguments, 1.0, 1.0, interleaved, norm_last) if interleaved or norm_last else arguments
        if norms != "all":
            gates = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
            queries = torch.stack((qkv[:, : heads * dim].view(tokens, heads, dim), gates), 2).flatten(1)
            gated = torch.cat((queries, qkv[:, heads * dim :]), 1)
            yield (gated, *arguments[1:], 1.0, 1.0, interleaved, norm_last, True)


def paged_attention(dtype: torch.dtype) -> Samples:
    cases = (  # rows as (new tokens, total length); query heads, KV heads, head dim, page, window
        (((1, 1),), 1, 1, 32, 16, 0),
        (((5, 5), (1, 40), (3, 130)), 4, 2, 64, 16, 0),
        (((1, 300), (1, 7), (1, 257)), 8, 1, 128, 16, 0),
        (((40, 300), (1, 299), (20, 20)), 6, 3, 80, 48, 37),
        (((150, 150), (1, 129)), 2, 2, 256, 7, 0),
    )
    for rows, heads, kv_heads, dim, page, window in cases:
        generator = torch.Generator().manual_seed(dim)
        new = torch.tensor([count for count, _ in rows], dtype=torch.int32)
        seq_lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
        blocks = -(-int(seq_lens.max()) // page)
        caches = torch.randn(2, len(rows) * blocks, kv_heads, page, dim, generator=generator).to(dtype)
        tables = torch.randperm(len(rows) * blocks, generator=generator).view(len(rows), blocks).int()
        query_start = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()])
        q = torch.randn(int(new.sum()), heads, dim, generator=generator).to(dtype)
        rest = caches[0], caches[1], tables, query_start, seq_lens, dim**-0.5, window
        yield q, *rest
        if heads > 1:
            yield q, *rest, 1.0, 5.0 if dim < 64 else 0.0, torch.randn(heads, generator=generator) * 3
        if dim < 128:
            yield q * 8, *rest, 1.0, 5.0
        both_ways = torch.arange(len(rows)) % 2 == 0
        yield q, *rest, 1.0, 0.0, None, both_ways
