"""References of attention over a paged KV cache, and of the stores into it.

For batch invariance, a token's bits must not depend on its chunk or on the batch.  So queries are in tiles by absolute
position (tile = position // TILE, index in it = position % TILE) and keys in splits by absolute position, both always
padded to full size: the matrix products of a token have one shape, with the token at one index.  Masked keys get a
weight of exactly zero; splits merge in ascending order.  Products run on one thread, because a library may divide their
sums by the number of threads.  All else is elementwise, or a sum over one row, computed for real tokens only.
The caches have the shape [B,Hk,P,D]; the layout of a head's P * D elements in a page is the implementation's, so the
three ops are chosen together.  Here it is rows [P,D].
"""

from __future__ import annotations

import sys
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
PIECE = 256  # maximum of queries of a row, and
BATCH = 16  # maximum of rows, computed at a time: their data stays in the cache
FLOAT8 = torch.float8_e4m3fn
MAX_FLOAT8 = 448.0
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

    A float8 (e4m3) cache stores k / k_scale and v / v_scale, divided in float32, rounded to the nearest, ties to even,
    and saturated.  Other caches have no scales.
    """
    page = k_cache.shape[2]
    block, offset = slot_mapping // page, slot_mapping % page
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        if cache.dtype == FLOAT8:
            new = (new.float() / scale).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(FLOAT8).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache[block, :, offset] = new


@op(tolerance={dtype: (0.0, 0.0) for dtype in TOLERANCE})
def store_rows(rows: Tensor, pages: Tensor, slot_mapping: Tensor) -> None:
    """Write rows [T,H] into pages [B,P,H] of their dtype at slots block * P + offset [T] int64, in place."""
    pages.view(-1, pages.shape[-1]).index_copy_(0, slot_mapping, rows)


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
    interleaved: bool = False,
    norm_last: bool = False,
    gated: bool = False,
) -> Tensor:
    """Turn a projection qkv [T,(Hq+2Hk)*D] into queries [T,Hq,D], and write its keys and values into the caches.

    q and k heads are normed by `rms_norm` with their weights (both None: no norm), then rotated by `rope`; `norm_last`:
    rotated, then normed.  Weights of [D] norm each head, weights of [Hq*D] and [Hk*D] all heads of a token together.
    `gated`: qkv is [T,(2Hq+2Hk)*D], behind each query head lie D elements that `gate_heads` reads; weights are [D].
    k and v are stored by `store_kv`.  Bit for bit the result of these three ops in sequence, roundings included.
    """
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    if gated:
        queries = qkv.shape[1] - 2 * kv_heads * dim
        heads_with_gates = qkv[:, :queries].reshape(len(qkv), queries // (2 * dim), 2, dim)
        qkv = torch.cat((heads_with_gates[:, :, 0].flatten(1), qkv[:, queries:]), 1)
    heads = qkv.shape[1] // dim
    parts = torch.split(qkv.view(-1, heads, dim), [heads - 2 * kv_heads, kv_heads, kv_heads], 1)
    q, k, v = (part.contiguous() for part in parts)  # [T,Hq,D], [T,Hk,D] twice

    def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if q_weight is None or k_weight is None:
            return q, k
        norm = elementwise.rms_norm.reference
        return (
            norm(q.reshape(-1, len(q_weight)), q_weight, eps).view(q.shape),
            norm(k.reshape(-1, len(k_weight)), k_weight, eps).view(k.shape),
        )

    if not norm_last:
        q, k = normed(q, k)
    q, k = elementwise.rope.reference(q, k, table, positions, interleaved)
    if norm_last:
        q, k = normed(q, k)
    store_kv.reference(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


@op(tolerance={})
def attention_work(
    q: Tensor, k_cache: Tensor, block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, window: int
) -> Tensor | None:
    """How `paged_attention` divides the work on rows like these, the same in all layers of one kind; of q [T,Hq,D] and
    k_cache only shapes and types count.  None: there is nothing to prepare."""
    return None


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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bidirectional: Tensor | None = None,
    work: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q K^T) V * v_scale for q [T,Hq,D] over the paged caches [B,Hk,P,D]: [T,Hq,D].

    Row r owns q[query_start[r]:query_start[r+1]], its last positions of seq_lens[r].  Its keys are in pages
    block_tables[r] ([R,max_blocks] int32), those of its own positions included.  Causal; `window` > 0 leaves each
    query its last `window` keys.  For a float8 cache, `scale` includes the keys' scale; `v_scale` is 1 for
    others.  `softcap` > 0: a score s becomes softcap * tanh(s / softcap).  `sinks` [Hq] float32: a score beside those
    of the keys, uncapped, whose value is zero.  `bidirectional` [R] bool: rows whose queries see the keys after
    themselves, too, up to the row's last; `window` leaves out keys before a query only.  `work`: what `attention_work`
    made of these rows and this window; None: it is made anew.
    Online softmax over splits: Milakov and Gimelshein, arXiv 1805.02867.
    """
    out = torch.empty_like(q)
    both_ways = [False] * len(seq_lens) if bidirectional is None else bidirectional.tolist()
    for pieces in _batches(_pieces(query_start.tolist(), seq_lens.tolist(), both_ways)):
        batch = _batch(pieces, window)
        tables = block_tables[[piece.row for piece in pieces]]
        caches = (_Pages(k_cache, tables), _Pages(v_cache, tables))
        mixed = _attend(q[batch.tokens].float() * scale, batch, *caches, softcap, sinks)
        out[batch.tokens] = (mixed * v_scale).to(q.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries of one row at positions start..end-1, the first of them at `token` in q.

    `last_key`: what all of them see; None: each sees the keys up to itself.
    """

    row: int
    token: int
    start: int
    end: int
    last_key: int | None = None

    @property
    def keys(self) -> int:
        """The first position that none of them sees."""
        return self.end if self.last_key is None else self.last_key + 1

    def num_tiles(self) -> int:
        return (self.end - 1) // TILE - self.start // TILE + 1


def _pieces(starts: list[int], totals: list[int], both_ways: list[bool]) -> Iterator[_Piece]:
    """The rows, divided at every multiple of PIECE, so that a piece reads few keys that it masks."""
    for row, total in enumerate(totals):
        first = total - (starts[row + 1] - starts[row])  # position of the row's first query
        cuts = [first, *range((first // PIECE + 1) * PIECE, total, PIECE), total]
        for start, end in pairwise(cuts):
            if start < end:
                yield _Piece(row, starts[row] + start - first, start, end, total - 1 if both_ways[row] else None)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one tile in batches of similar length; larger pieces alone, since their tiles share keys."""
    small = []
    for piece in pieces:
        if piece.num_tiles() == 1:
            small.append(piece)
        else:
            yield [piece]
    small.sort(key=lambda piece: piece.keys)
    for at in range(0, len(small), BATCH):
        yield small[at : at + BATCH]


@dataclass(frozen=True, slots=True)
class _Batch:
    """n tokens in tiles: one tile in each of several pieces, or all tiles of one piece."""

    tokens: Tensor  # [n], rows of q
    positions: Tensor  # [n]
    last_keys: Tensor  # [n], the last that each sees
    tile_index: Tensor  # [n], tile * TILE + index in the tile
    num_tiles: int
    ends: Tensor  # [pieces], the first position that none of a piece sees
    first_end: int  # their minimum
    splits: range
    window: int


def _batch(pieces: list[_Piece], window: int) -> _Batch:
    tokens, positions, last_keys, tile_index = [], [], [], []
    tiles = 0
    for piece in pieces:
        tokens.append(torch.arange(piece.token, piece.token + piece.end - piece.start))
        positions.append(torch.arange(piece.start, piece.end))
        last_keys.append(positions[-1] if piece.last_key is None else torch.full_like(positions[-1], piece.last_key))
        tile_index.append(positions[-1] + (tiles - piece.start // TILE) * TILE)
        tiles += piece.num_tiles()
    first = max(min(piece.start for piece in pieces) - window + 1, 0) if window else 0
    ends = [piece.keys for piece in pieces]
    splits = range(first // SPLIT, (max(ends) - 1) // SPLIT + 1)
    columns = (torch.cat(tokens), torch.cat(positions), torch.cat(last_keys), torch.cat(tile_index))
    return _Batch(*columns, tiles, torch.tensor(ends), min(ends), splits, window)


class _Pages:
    """One cache and the block tables [rows,max_blocks] of some rows."""

    def __init__(self, cache: Tensor, tables: Tensor) -> None:
        self.heads, self.page, self.dim = cache.shape[1:]
        self.unit = gcd(self.page, SPLIT)  # tokens that are adjacent in both the page and the split
        self.units = cache.view(-1, self.unit * self.dim)  # [blocks * heads * units of a page, unit * dim]
        if cache.dtype == FLOAT8:
            self.units = self.units.float()
        self.tables = tables

    def split(self, index: int) -> Tensor:
        """Keys index * SPLIT ... of every row, as float32: [heads, rows, SPLIT, dim], arbitrary past the end."""
        positions = torch.arange(index * SPLIT, (index + 1) * SPLIT, self.unit)
        blocks = (positions // self.page).clamp(max=self.tables.shape[1] - 1)
        head = torch.arange(self.heads)[:, None, None]
        block = self.tables[:, blocks].long().clamp(min=0)  # [rows, units of the split]
        unit = (block * self.heads + head) * (self.page // self.unit) + positions % self.page // self.unit
        return self.units.index_select(0, unit.flatten()).view(self.heads, -1, SPLIT, self.dim).float()


def _attend(q: Tensor, batch: _Batch, keys: _Pages, values: _Pages, softcap: float, sinks: Tensor | None) -> Tensor:
    """Attention of scaled float32 queries q [n,Hq,D]: [n,Hq,D] float32."""
    count, heads, dim = q.shape
    kv_heads, group = keys.heads, heads // keys.heads
    by_head = q.view(count, kv_heads, group, dim).transpose(0, 1)  # [Hk,n,G,D]
    tiled = q.new_zeros(kv_heads, batch.num_tiles * TILE, group, dim)
    tiled[:, batch.tile_index] = by_head
    row_max = q.new_full((kv_heads, count, group, 1), float("-inf"))
    row_sum = torch.zeros_like(row_max)
    acc = torch.zeros_like(by_head, memory_format=torch.contiguous_format)
    for split in batch.splits:
        position = torch.arange(split * SPLIT, (split + 1) * SPLIT)  # [SPLIT]
        visible = position <= batch.last_keys[:, None]  # [n,SPLIT]
        if batch.window:
            visible &= position > batch.positions[:, None] - batch.window
        scores = _products(tiled, keys.split(split).transpose(-1, -2), batch)  # [Hk,n,G,SPLIT]
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill_(~visible[:, None], float("-inf"))
        value = values.split(split)
        if (split + 1) * SPLIT > batch.first_end:
            value.masked_fill_((position >= batch.ends[:, None])[..., None], 0.0)
        split_max = scores.amax(-1, keepdim=True)  # [Hk,n,G,1]
        probs = torch.exp(scores - _finite(split_max))
        tiled_probs = tiled.new_zeros(kv_heads, batch.num_tiles * TILE, group, SPLIT)
        tiled_probs[:, batch.tile_index] = probs
        split_acc = _products(tiled_probs, value, batch)  # [Hk,n,G,D]
        new_max = torch.maximum(row_max, split_max)
        rescale, split_rescale = torch.exp(row_max - _finite(new_max)), torch.exp(split_max - _finite(new_max))
        row_sum = row_sum * rescale + probs.sum(-1, keepdim=True) * split_rescale
        acc = acc * rescale + split_acc * split_rescale
        row_max = new_max
    if sinks is not None:
        sink = sinks.view(kv_heads, 1, group, 1)
        new_max = torch.maximum(row_max, sink)
        rescale = torch.exp(row_max - new_max)
        acc, row_sum = acc * rescale, row_sum * rescale + torch.exp(sink - new_max)
    return (acc / row_sum).transpose(0, 1).reshape(count, heads, dim)


def _finite(row_max: Tensor) -> Tensor:
    """-inf (no visible key) becomes 0, so that exp(-inf - row_max) is 0 and not NaN."""
    return row_max.masked_fill(row_max == float("-inf"), 0.0)


def _products(tiled: Tensor, matrix: Tensor, batch: _Batch) -> Tensor:
    """tiled [Hk,tiles*TILE,G,A] x matrix [Hk,rows,A,B], tile by tile; returns the tokens' rows [Hk,n,G,B]."""
    kv_heads, _, group, depth = tiled.shape
    width = matrix.shape[-1]
    shape = (batch.num_tiles, TILE * group, depth)
    product = tiled.new_empty(kv_heads, batch.num_tiles, TILE * group, width)
    with one_thread():
        for head in range(kv_heads):
            shared = matrix[head].expand(batch.num_tiles, depth, width)
            torch.bmm(tiled[head].view(shape), shared, out=product[head])
    return product.view(kv_heads, -1, group, width).index_select(1, batch.tile_index)


def attention_keys() -> tuple[int, int] | None:
    """Keys that requests of all calls so far needed, and those that were read for another request anyway; None: the
    C++ ops are absent, which alone count them."""
    extension = sys.modules.get("tokserve._C")
    return None if extension is None else extension.attention_keys()
