"""Attention within chunks of a context, as Llama 4 has it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokserve import ops
from tokserve.layers.attention import Attention, AttentionSpec
from tokserve.layers.batch import ForwardBatch, LogitsRows
from tokserve.layers.options import LayerOptions
from tokserve.protocol.kv_spec import KVSpec

FEW = 8  # queries of a row in steps that decode, drafts included, on average


@dataclass(frozen=True, slots=True)
class ChunkedAttentionSpec(AttentionSpec):
    """Positions are in chunks of `chunk`, and a query sees the keys of its chunk up to itself."""

    chunk: int = 8192

    def layer(self, hidden: int, options: LayerOptions) -> ChunkedAttention:
        """The layer without weights."""
        return ChunkedAttention(hidden, self, options)


class ChunkRows(NamedTuple):
    """The rows of a batch, each divided at the boundaries of chunks, as attention takes them."""

    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor


class ChunkedAttention(Attention):
    """Attention of each query to the keys of its chunk.

    What a row has in a chunk is computed as a row that begins there, so a token's bits do not depend on earlier chunks.
    Contexts of one chunk are computed as by `Attention`.
    """

    def __init__(self, hidden: int, spec: ChunkedAttentionSpec, options: LayerOptions) -> None:
        super().__init__(hidden, spec, options)
        self.chunk = spec.chunk

    def kv_spec(self) -> KVSpec:
        return replace(super().kv_spec(), chunk=self.chunk)

    def divide(self, projected: Tensor, keys: Tensor, batch: ForwardBatch) -> None:
        """Divide the rows, where a context may have several chunks."""
        page = keys.shape[2]
        if batch.block_tables.shape[1] * page <= self.chunk:
            super().divide(projected, keys, batch)
        elif ("chunks", self.chunk) not in batch.work:
            batch.work["chunks", self.chunk] = chunk_rows(batch, len(projected), page, self.chunk)

    def mix(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, rows: LogitsRows | ForwardBatch
    ) -> Tensor:  # [n, heads, dim] -> same
        page = keys.shape[2]
        if rows.block_tables.shape[1] * page <= self.chunk:
            return super().mix(q, keys, values, batch, rows)
        parts = batch.work.get(("chunks", self.chunk)) if rows is batch else None
        parts = parts or chunk_rows(rows, len(q), page, self.chunk)
        return ops.paged_attention(
            q,
            keys,
            values,
            parts.block_tables,
            parts.query_start,
            parts.seq_lens,
            self.scale * self.k_scale,
            0,
            self.v_scale,
            self.softcap,
            self.sinks,
        )


def chunk_rows(rows: LogitsRows | ForwardBatch, queries: int, page: int, chunk: int) -> ChunkRows:
    """How `ChunkedAttention` divides the rows of a batch of so many queries.

    Every part has a query, as kernels expect it.  In steps that decode, each query is a part: what shapes say is enough
    for that, so these steps can be captured.
    """
    starts, lens = rows.query_start.long(), rows.seq_lens.long()
    device = starts.device
    if queries <= FEW * len(lens):
        tokens = torch.arange(queries, device=device)
        row = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=len(lens) - 1)
        last = lens[row] - starts[1:][row] + tokens + 1
        begin, counts = (last - 1) // chunk * chunk, torch.ones_like(tokens)
    else:
        first = lens - starts.diff()  # [R], the position of a row's first query
        numbers = first[:, None] // chunk + torch.arange(queries // chunk + 2, device=device)  # [R, parts]
        last = torch.minimum(lens[:, None], (numbers + 1) * chunk)
        counts = last - torch.maximum(first[:, None], numbers * chunk)
        row, part = (counts > 0).nonzero(as_tuple=True)  # the host waits for their number
        begin, last, counts = numbers[row, part] * chunk, last[row, part], counts[row, part]
    columns = (begin // page)[:, None] + torch.arange(chunk // page, device=device)
    tables = rows.block_tables[row].gather(1, columns.clamp_(max=rows.block_tables.shape[1] - 1))
    query_start = torch.cat((torch.zeros_like(starts[:1]), counts.cumsum(0)))
    return ChunkRows(tables, query_start.int(), (last - begin).int())
