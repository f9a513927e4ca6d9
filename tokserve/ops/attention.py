"""Attention over a paged KV cache, and the store into it, as torch says them.

A token's bits must not depend on the chunk it came in or on who else is in the batch.  So queries sit in tiles by
absolute position (tile = position // TILE, place in it = position % TILE), keys come in splits by absolute position,
both always filled up to full size: the matrix products of a token have one shape and hold it in one place.  Masked
keys weigh exactly zero; splits merge in ascending order.  Products run on one thread: a library may cut their sums by
the number of threads.  The rest is elementwise, or a sum over one row, and done for real tokens only.
The caches' shape is [B,Hk,P,D]: how the P * D elements of a head lie in its place of a page is the affair of the
implementation, so the three ops are chosen together.  Here they lie as rows [P,D].
This file must not know layers, requests or who owns a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

from tokserve.ops import elementwise
from tokserve.ops.registry import op
from tokserve.ops.serial import one_thread

TILE = 8  # query positions of one product
SPLIT = 128  # keys of one product
PIECE = 256  # most queries of a row, and
BATCH = 16  # most rows, that are computed at a time: what they need stays in the cache
FLOAT8 = torch.float8_e4m3fn
MOST_FLOAT8 = 448.0
TOLERANCE = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (4e-3, 8e-3), torch.float16: (2e-6, 1e-3)}


@op(tolerance={dtype: (0.0, 0.0) for dtype in TOLERANCE}, follows="paged_attention")
def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k and v [T,Hk,D] into the caches [B,Hk,P,D] at slots block * P + offset [T] int64, in place.

    A cache of float8 (e4m3) takes k / k_scale and v / v_scale, in float32: of these the nearest numbers it has, ties to
    even; past its largest, that.  Another has no scales.
    """
    page = k_cache.shape[2]
    block, offset = slot_mapping // page, slot_mapping % page
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if cache.dtype == FLOAT8:
            new = (new.float() / scale).clamp(-MOST_FLOAT8, MOST_FLOAT8).to(FLOAT8).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache[block, :, offset] = new


@op(tolerance=elementwise.TOLERANCE, follows="paged_attention")
def norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """From a projection qkv [T,(Hq+2Hk)*D] to queries [T,Hq,D], with its keys and values written into the caches.

    q and k heads are normed by `rms_norm` with their weights [D] (None, both: not), then turned by `rope`; k and v
    are stored by `store_kv`.  Bit for bit what these three do one after the other, roundings between them included.
    """
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.shape[1] // dim
    parts = torch.split(qkv.view(-1, heads, dim), [heads - 2 * kv_heads, kv_heads, kv_heads], 1)
    q, k, v = (part.contiguous() for part in parts)  # [T,Hq,D], [T,Hk,D] twice
    if q_weight is not None and k_weight is not None:
        q = elementwise.rms_norm.reference(q.view(-1, dim), q_weight, eps).view(q.shape)
        k = elementwise.rms_norm.reference(k.view(-1, dim), k_weight, eps).view(k.shape)
    q, k = elementwise.rope.reference(q, k, table, positions)
    store_kv.reference(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


@op(tolerance=TOLERANCE)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    v_scale: float = 1.0,
) -> Tensor:
    """softmax(scale * q K^T) V * v_scale for q [T,Hq,D] over the paged caches [B,Hk,P,D]: [T,Hq,D].

    Row r owns q[query_start[r]:query_start[r+1]], its last positions of seq_lens[r].  Its keys are in pages
    block_tables[r] ([R,max_blocks] int32), those of its own positions included.  Causal; `window` > 0 leaves each
    query its last `window` keys.  What a float8 cache's keys are scaled by is in `scale`; `v_scale` is 1 for others.
    Online softmax over splits: Milakov and Gimelshein, arXiv 1805.02867.
    """
    out = torch.empty_like(q)
    for pieces in _batches(_pieces(query_start.tolist(), seq_lens.tolist())):
        batch = _batch(pieces, window)
        tables = block_tables[[piece.row for piece in pieces]]
        caches = (_Pages(k_cache, tables), _Pages(v_cache, tables))
        out[batch.tokens] = (_attend(q[batch.tokens].float() * scale, batch, *caches) * v_scale).to(q.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries of one row at positions start..end-1, the first of them at `token` in q."""

    row: int
    token: int
    start: int
    end: int

    def num_tiles(self) -> int:
        return (self.end - 1) // TILE - self.start // TILE + 1


def _pieces(starts: list[int], totals: list[int]) -> Iterator[_Piece]:
    """The rows, cut at every position that is a multiple of PIECE: no piece sees much more than it needs."""
    for row, total in enumerate(totals):
        first = total - (starts[row + 1] - starts[row])  # position of the row's first query
        cuts = [first, *range((first // PIECE + 1) * PIECE, total, PIECE), total]
        for start, end in pairwise(cuts):
            if start < end:
                yield _Piece(row, starts[row] + start - first, start, end)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one tile together, BATCH of similar length at a time; others alone, as their tiles share keys."""
    small = []
    for piece in pieces:
        if piece.num_tiles() == 1:
            small.append(piece)
        else:
            yield [piece]
    small.sort(key=lambda piece: piece.end)
    for at in range(0, len(small), BATCH):
        yield small[at : at + BATCH]


@dataclass(frozen=True, slots=True)
class _Batch:
    """n tokens in tiles: one tile in each of several pieces, or all tiles of one piece."""

    tokens: Tensor  # [n], places in q
    positions: Tensor  # [n]
    places: Tensor  # [n], tile * TILE + place in the tile
    num_tiles: int
    ends: Tensor  # [pieces], positions from here on hold nothing
    first_end: int  # the least of them
    splits: range
    window: int


def _batch(pieces: list[_Piece], window: int) -> _Batch:
    tokens, positions, places = [], [], []
    tiles = 0
    for piece in pieces:
        tokens.append(torch.arange(piece.token, piece.token + piece.end - piece.start))
        positions.append(torch.arange(piece.start, piece.end))
        places.append(positions[-1] + (tiles - piece.start // TILE) * TILE)
        tiles += piece.num_tiles()
    first = max(min(piece.start for piece in pieces) - window + 1, 0) if window else 0
    ends = [piece.end for piece in pieces]
    splits = range(first // SPLIT, (max(ends) - 1) // SPLIT + 1)
    whole = (torch.cat(tokens), torch.cat(positions), torch.cat(places))
    return _Batch(*whole, tiles, torch.tensor(ends), min(ends), splits, window)


class _Pages:
    """One cache and the block tables [rows,max_blocks] of some rows."""

    def __init__(self, cache: Tensor, tables: Tensor) -> None:
        self.heads, self.page, self.dim = cache.shape[1:]
        self.unit = gcd(self.page, SPLIT)  # tokens that lie together in the page and in the split
        self.units = cache.view(-1, self.unit * self.dim)  # [blocks * heads * units of a page, unit * dim]
        if cache.dtype == FLOAT8:
            self.units = self.units.float()
        self.tables = tables

    def split(self, index: int) -> Tensor:
        """Keys index * SPLIT ... of every row, as float32: [heads, rows, SPLIT, dim].  Past the end: anything."""
        positions = torch.arange(index * SPLIT, (index + 1) * SPLIT, self.unit)
        blocks = (positions // self.page).clamp(max=self.tables.shape[1] - 1)
        head = torch.arange(self.heads)[:, None, None]
        block = self.tables[:, blocks].long().clamp(min=0)  # [rows, units of the split]
        unit = (block * self.heads + head) * (self.page // self.unit) + positions % self.page // self.unit
        return self.units.index_select(0, unit.flatten()).view(self.heads, -1, SPLIT, self.dim).float()


def _attend(q: Tensor, batch: _Batch, keys: _Pages, values: _Pages) -> Tensor:
    """Attention of scaled float32 queries q [n,Hq,D]: [n,Hq,D] float32."""
    count, heads, dim = q.shape
    kv_heads, group = keys.heads, heads // keys.heads
    by_head = q.view(count, kv_heads, group, dim).transpose(0, 1)  # [Hk,n,G,D]
    tiled = q.new_zeros(kv_heads, batch.num_tiles * TILE, group, dim)
    tiled[:, batch.places] = by_head
    top = q.new_full((kv_heads, count, group, 1), float("-inf"))
    mass = torch.zeros_like(top)
    result = torch.zeros_like(by_head, memory_format=torch.contiguous_format)
    for split in batch.splits:
        position = torch.arange(split * SPLIT, (split + 1) * SPLIT)  # [SPLIT]
        seen = position <= batch.positions[:, None]  # [n,SPLIT]
        if batch.window:
            seen &= position > batch.positions[:, None] - batch.window
        scores = _products(tiled, keys.split(split).transpose(-1, -2), batch)  # [Hk,n,G,SPLIT]
        scores = scores.masked_fill_(~seen[:, None], float("-inf"))
        value = values.split(split)
        if (split + 1) * SPLIT > batch.first_end:
            value.masked_fill_((position >= batch.ends[:, None])[..., None], 0.0)
        split_top = scores.amax(-1, keepdim=True)  # [Hk,n,G,1]
        weights = torch.exp(scores - _finite(split_top))
        spread = tiled.new_zeros(kv_heads, batch.num_tiles * TILE, group, SPLIT)
        spread[:, batch.places] = weights
        split_result = _products(spread, value, batch)  # [Hk,n,G,D]
        new_top = torch.maximum(top, split_top)
        old_share, share = torch.exp(top - _finite(new_top)), torch.exp(split_top - _finite(new_top))
        mass = mass * old_share + weights.sum(-1, keepdim=True) * share
        result = result * old_share + split_result * share
        top = new_top
    return (result / mass).transpose(0, 1).reshape(count, heads, dim)


def _finite(top: Tensor) -> Tensor:
    """-inf (no key seen) becomes 0, so that exp(-inf - top) is 0 and not NaN."""
    return top.masked_fill(top == float("-inf"), 0.0)


def _products(tiled: Tensor, matrix: Tensor, batch: _Batch) -> Tensor:
    """tiled [Hk,tiles*TILE,G,A] x matrix [Hk,rows,A,B], tile by tile; the tokens' places of it: [Hk,n,G,B]."""
    kv_heads, _, group, depth = tiled.shape
    width = matrix.shape[-1]
    shape = (batch.num_tiles, TILE * group, depth)
    product = tiled.new_empty(kv_heads, batch.num_tiles, TILE * group, width)
    with one_thread():
        for head in range(kv_heads):
            shared = matrix[head].expand(batch.num_tiles, depth, width)
            torch.bmm(tiled[head].view(shape), shared, out=product[head])
    return product.view(kv_heads, -1, group, width).index_select(1, batch.places)
