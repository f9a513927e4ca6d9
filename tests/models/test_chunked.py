"""Attention within chunks: the keys that each query sees, whatever the batch, on the references and the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.test_exact import randn
from tokserve.families.mixtures.chunked import chunk_rows
from tokserve.layers.batch import LogitsRows
from tokserve.ops import registry
from tokserve.ops.registry import OPS

HEADS, DIM, PAGE, CHUNK = 2, 16, 4, 8
# queries and length of each row: within a chunk, at its end, at the beginning of one, across several
MIXED = [(1, 5), (1, 8), (1, 9), (3, 10), (20, 29), (8, 8)]
BATCHES = {"decode": [(1, 5), (1, 8), (1, 9), (1, 30)], "drafts": MIXED, "prompts": [(30, 30), (9, 17), (1, 9)]}


def rows_of(work: list[tuple[int, int]]) -> LogitsRows:
    counts = torch.tensor([count for count, _ in work])
    tables = torch.randperm(len(work) * 8, generator=torch.Generator().manual_seed(0)).int().view(len(work), 8)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    lens = torch.tensor([length for _, length in work], dtype=torch.int32)
    return LogitsRows(torch.arange(int(counts.sum())), starts, lens, tables)


def expected(q: Tensor, caches: Tensor, work: list[tuple[int, int]], rows: LogitsRows) -> Tensor:
    """Each query with the keys of its chunk up to itself, by itself."""
    out = torch.zeros_like(q)
    for row, (count, length) in enumerate(work):
        keys, values = (
            cache[rows.block_tables[row].long()].transpose(1, 2).flatten(0, 1)[:length].double() for cache in caches
        )  # [length, 1, DIM]
        for token in range(count):
            position, index = length - count + token, int(rows.query_start[row]) + token
            seen = slice(position // CHUNK * CHUNK, position + 1)
            scores = (q[index].double() @ keys[seen, 0].t() * 0.3).softmax(-1)
            out[index] = scores @ values[seen, 0]
    return out


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("kind", BATCHES)
def test_a_query_sees_the_keys_of_its_chunk_up_to_itself(kind: str, name: str) -> None:
    pytest.importorskip("triton")
    assert registry.load_extension("cuda") is None
    work = BATCHES[kind]
    rows, count = rows_of(work), sum(count for count, _ in work)
    q, caches = randn(torch.float16, 1, count, HEADS, DIM), randn(torch.float16, 2, 2, len(work) * 8, 1, PAGE, DIM)
    parts = chunk_rows(rows, count, PAGE, CHUNK)
    assert (parts.query_start.diff() > 0).all() and parts.query_start[-1] == count
    assert (len(parts.seq_lens) == count) == (kind != "prompts")
    mixed = OPS["paged_attention"].implementations[name].call(q, *caches, *parts, 0.3, 0)
    torch.testing.assert_close(mixed, expected(q, caches, work, rows), atol=2e-3, rtol=2e-3)
