"""Paged attention on the GPU: decode and prefill kernels of one arithmetic, and the store into the cache.

A query's keys come in splits by absolute position, a split in tiles of KEYS keys with an online softmax; splits merge
in ascending order.  Both kernels run the same `attend_split` and `merge` on tiles of one shape, so a token has the same
bits in decode, in a chunk and in a whole prompt: masked keys get a weight of exactly zero and change nothing.

- decode (rows with one query): a program computes one (row, KV head, split) at a time into scratch memory; a second
  launch merges.  The query heads that share a KV head are in one tile.
- prefill (all other rows): a program computes a tile of queries over all their splits.

Lengths are read on the device, so that a captured graph serves any length.  Flash-decoding: Dao et al., 2023.  Names
are FlashAttention's: row_max, row_sum, acc.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.ops import attention
from tokserve.ops.triton.elementwise import pairing, rotate, tanh
from tokserve.ops.triton.float8 import nearest
from tokserve.ops.triton.launch import EXACT, multiprocessors, tuned, warps

SPLIT = 256  # keys of one partial softmax; part of the arithmetic
KEYS = 64  # keys of one tile; part of the arithmetic
TILE = 64  # query heads of one tile: the minimum of sm_90's matrix unit
FLOAT32_KEYS, FLOAT32_TILE = 32, 16  # the same in float32, which has no matrix unit: larger tiles spill
WARPS = 4  # part of the arithmetic: the order of a sum over keys
MERGE_STAGES = tl.constexpr(5)  # splits in flight, the one that is merged included
ROWS_BLOCK = 128  # minimum of rows that a program searches for its own: one per thread costs no more than a single one
LOG2_E = 1.4426950408889634
LOG2_E_IN_KERNELS = tl.constexpr(LOG2_E)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def finite(row_max):
    """-inf (no key visible) becomes 0, so that exp2(-inf - row_max) is 0 and not NaN."""
    return tl.where(row_max == NEG_INF, 0.0, row_max)


@triton.jit
def merge(acc, row_max, row_sum, part, part_max, part_sum):
    """Merge two partial softmaxes.  One without keys changes no bit of the other."""
    new_max = tl.maximum(row_max, part_max)
    rescale, part_rescale = tl.exp2(row_max - finite(new_max)), tl.exp2(part_max - finite(new_max))
    return (
        acc * tl.expand_dims(rescale, -1) + part * tl.expand_dims(part_rescale, -1),
        new_max,
        row_sum * rescale + part_sum * part_rescale,
    )


@triton.jit
def with_sink(acc, row_max, row_sum, sink):
    """Add a score, in units of powers of two, whose value is zero."""
    new_max = tl.maximum(row_max, sink)
    rescale = tl.exp2(row_max - new_max)
    return acc * rescale[:, None], row_sum * rescale + tl.exp2(sink - new_max)


@triton.jit
def attend_split(
    q, position, k_ptr, v_ptr, table_ptr, split, first_key, end, scale, softcap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, KEYS: tl.constexpr, DIM_BLOCK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Queries q [M,D] at `position` [M] over the keys of a split that lie in first_key..end-1.

    k_ptr, v_ptr: the KV head in page 0; `scale` is for powers of two, unless scores are CAPPED.  Returns the
    undivided acc [M,D], row_max [M] and row_sum [M], all float32.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    row_max = tl.full([q.shape[0]], NEG_INF, tl.float32)
    row_sum = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], DIM_BLOCK], tl.float32)
    start = tl.maximum(split * SPLIT, first_key // KEYS * KEYS)
    for tile in range(start, tl.minimum((split + 1) * SPLIT, end), KEYS):
        key = tile + tl.arange(0, KEYS)
        valid = (key < end)[:, None] & (column < DIM)
        if PAGE % KEYS == 0:
            block = tl.load(table_ptr + tile // PAGE).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // PAGE, mask=key < end, other=0).to(tl.int64)
        offset = (block * (KV_HEADS * PAGE) + key % PAGE)[:, None] * DIM + column
        k = tl.load(k_ptr + offset, mask=valid, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M,KEYS]
        if CAPPED:
            scores = tanh(tl.div_rn(scores, softcap)) * softcap * LOG2_E_IN_KERNELS
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, NEG_INF)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        probs = tl.exp2(scores - finite(new_max)[:, None])
        rescale = tl.exp2(row_max - finite(new_max))
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        v = tl.load(v_ptr + offset, mask=valid, other=0.0).to(q.dtype)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["rows", "table_stride", "max_splits"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, start_ptr, len_ptr, part_ptr, max_ptr, sum_ptr,
    rows, scale, softcap, q_stride, table_stride, max_splits, page_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, KEYS: tl.constexpr, DIM_BLOCK: tl.constexpr, CAPPED: tl.constexpr, TILE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Every (row with one query, split, KV head): partial acc [R,splits,Hq,D], row_max and row_sum [R,splits,Hq]."""
    index = tl.arange(0, ROWS_BLOCK)
    length = tl.load(len_ptr + index, mask=index < rows, other=0)
    start = tl.load(start_ptr + index, mask=index < rows, other=0)
    queries = tl.load(start_ptr + index + 1, mask=index < rows, other=0) - start
    first = tl.maximum(length - WINDOW, 0) // SPLIT if WINDOW > 0 else tl.zeros_like(length)
    count = tl.where(queries == 1, (length + SPLIT - 1) // SPLIT - first, 0)
    up_to = tl.cumsum(count, 0)
    items = tl.sum(count, 0) * KV_HEADS
    slot = tl.arange(0, TILE)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        pair = item // KV_HEADS
        kv_head = item % KV_HEADS
        row = tl.sum((up_to <= pair).to(tl.int32), 0)
        is_row = index == row
        split = pair - tl.sum(tl.where(index < row, count, 0), 0) + tl.sum(tl.where(is_row, first, 0), 0)
        end = tl.sum(tl.where(is_row, length, 0), 0)
        token = tl.sum(tl.where(is_row, start, 0), 0).to(tl.int64)
        head = kv_head * GROUP + slot
        is_head = slot < GROUP
        inside = is_head[:, None] & (column < DIM)
        q = tl.load(q_ptr + token * q_stride + head[:, None] * DIM + column, mask=inside, other=0.0)
        first_key = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
        position = tl.full([TILE], 0, tl.int32) + (end - 1)
        part, row_max, row_sum = attend_split(
            q, position, k_ptr + kv_head * page_stride, v_ptr + kv_head * page_stride,
            table_ptr + row.to(tl.int64) * table_stride, split, first_key, end, scale, softcap,
            KV_HEADS, DIM, PAGE, WINDOW, SPLIT, KEYS, DIM_BLOCK, CAPPED,
        )  # fmt: skip
        offset = (row.to(tl.int64) * max_splits + split) * (GROUP * KV_HEADS) + head
        tl.store(part_ptr + offset[:, None] * DIM + column, part, mask=inside)
        tl.store(max_ptr + offset, row_max, mask=is_head)
        tl.store(sum_ptr + offset, row_sum, mask=is_head)


@triton.jit(do_not_specialize=["max_splits"])
def merge_kernel(
    part_ptr, max_ptr, sum_ptr, start_ptr, len_ptr, out_ptr, sinks_ptr, max_splits, v_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, DIM_BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """One query head of one row with one query: its splits in ascending order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(start_ptr + row)
    length = tl.load(len_ptr + row)
    if tl.load(start_ptr + row + 1) - start == 1:
        column = tl.arange(0, DIM_BLOCK)
        acc = tl.zeros([1, DIM_BLOCK], tl.float32)
        row_max = tl.full([1], NEG_INF, tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        first = tl.maximum(length - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
        for split in tl.range(first, (length + SPLIT - 1) // SPLIT, num_stages=MERGE_STAGES):
            offset = (row * max_splits + split) * HEADS + head + tl.arange(0, 1)
            part = tl.load(part_ptr + offset[:, None] * DIM + column[None, :], mask=column[None, :] < DIM, other=0.0)
            acc, row_max, row_sum = merge(
                acc, row_max, row_sum, part, tl.load(max_ptr + offset), tl.load(sum_ptr + offset)
            )
        if SINKS:
            sink = tl.load(sinks_ptr + head + tl.arange(0, 1)) * LOG2_E_IN_KERNELS
            acc, row_sum = with_sink(acc, row_max, row_sum, sink)
        out = acc / row_sum[:, None] * v_scale
        offset = (start.to(tl.int64) * HEADS + head) * DIM + column[None, :]
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=column[None, :] < DIM)


@triton.jit
def row_of_tile(start_ptr, rows, tile, QUERIES: tl.constexpr):
    """The row whose queries `tile` holds, when row r's tiles begin at query_start[r] // QUERIES + r."""
    low, high = 0, rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(start_ptr + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["rows", "table_stride"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, start_ptr, len_ptr, out_ptr, sinks_ptr,
    rows, scale, softcap, v_scale, q_stride, table_stride, page_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, KEYS: tl.constexpr, DIM_BLOCK: tl.constexpr, CAPPED: tl.constexpr, TILE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """A tile of queries (of a row with several) that share a KV head, over all their splits."""
    QUERIES: tl.constexpr = TILE // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long ones, late in their rows, come first
    kv_head = tl.program_id(1)
    row = row_of_tile(start_ptr, rows, tile, QUERIES)
    start = tl.load(start_ptr + row)
    queries = tl.load(start_ptr + row + 1) - start
    length = tl.load(len_ptr + row)
    first_query = (tile - (start // QUERIES + row)) * QUERIES
    if (queries > 1) & (first_query < queries):
        slot = tl.arange(0, TILE)
        query = first_query + slot // GROUP
        is_query = (slot < QUERIES * GROUP) & (query < queries)
        column = tl.arange(0, DIM_BLOCK)[None, :]
        inside = is_query[:, None] & (column < DIM)
        head = kv_head * GROUP + slot % GROUP
        token = (start + query).to(tl.int64)
        q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * DIM + column, mask=inside, other=0.0)
        position = length - queries + query
        end = length - queries + tl.minimum(first_query + QUERIES, queries)  # no query of the tile sees further
        first_key = tl.maximum(length - queries + first_query + 1 - WINDOW, 0) if WINDOW > 0 else 0
        acc = tl.zeros([TILE, DIM_BLOCK], tl.float32)
        row_max = tl.full([TILE], NEG_INF, tl.float32)
        row_sum = tl.zeros([TILE], tl.float32)
        for split in range(first_key // SPLIT, (end + SPLIT - 1) // SPLIT):
            part, part_max, part_sum = attend_split(
                q, position, k_ptr + kv_head * page_stride, v_ptr + kv_head * page_stride,
                table_ptr + row.to(tl.int64) * table_stride, split, first_key, end, scale, softcap,
                KV_HEADS, DIM, PAGE, WINDOW, SPLIT, KEYS, DIM_BLOCK, CAPPED,
            )  # fmt: skip
            acc, row_max, row_sum = merge(acc, row_max, row_sum, part, part_max, part_sum)
        if SINKS:
            sink = tl.load(sinks_ptr + head) * LOG2_E_IN_KERNELS
            acc, row_sum = with_sink(acc, finite(row_max), row_sum, sink)
        out = acc / tl.where(is_query, row_sum, 1.0)[:, None] * v_scale
        offset = (token * (GROUP * KV_HEADS) + head)[:, None] * DIM + column
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@attention.paged_attention.implement("triton", device="cuda")
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
) -> Tensor:
    """q may be a slice of a tensor [T, ...].  Raises NotImplementedError for bidirectional rows: those of images, which
    a GPU does not take."""
    if bidirectional is not None:
        raise NotImplementedError("attention to later keys has no kernel for this device")
    tokens, heads, dim = q.shape
    rows, width = block_tables.shape
    kv_heads, page = k_cache.shape[1:3]
    out = q.new_empty(q.shape)
    if tokens == 0:
        return out
    group = heads // kv_heads
    keys, tile = (FLOAT32_KEYS, FLOAT32_TILE) if q.dtype == torch.float32 else (KEYS, TILE)
    tile = max(tile, triton.next_power_of_2(group))
    dim_block = max(16, triton.next_power_of_2(dim))
    shape = (group, kv_heads, dim, page, window, SPLIT, keys, dim_block, softcap > 0.0, tile)
    config = tuned("attention", q.device.index, row_bytes=dim_block * k_cache.element_size(), group=group)
    scale *= 1.0 if softcap > 0.0 else LOG2_E  # capped scores are multiplied by it in the kernel
    strides = (q.stride(0), block_tables.stride(0))
    if tokens > rows:
        queries = tile // group
        prefill_kernel[(tokens // queries + rows, kv_heads)](
            q, k_cache, v_cache, block_tables, query_start, seq_lens, out, out if sinks is None else sinks,
            rows, scale, softcap, v_scale, *strides, page * dim, *shape, sinks is not None,
            num_warps=WARPS, num_stages=config["prefill_stages"], **EXACT,
        )  # fmt: skip
    max_splits = triton.cdiv(width * page, SPLIT)
    parts = q.new_empty((rows, max_splits, heads, dim), dtype=torch.float32)
    maxima, row_sums = q.new_empty((2, rows, max_splits, heads), dtype=torch.float32).unbind()
    programs = config["programs"] * multiprocessors(q.device.index)
    decode_kernel[(min(programs, rows * kv_heads * max_splits),)](
        q, k_cache, v_cache, block_tables, query_start, seq_lens, parts, maxima, row_sums,
        rows, scale, softcap, *strides, max_splits, page * dim, *shape, max(ROWS_BLOCK, triton.next_power_of_2(rows)),
        num_warps=WARPS, num_stages=config["decode_stages"], **EXACT,
    )  # fmt: skip
    merge_kernel[(rows, heads)](
        parts, maxima, row_sums, query_start, seq_lens, out, out if sinks is None else sinks, max_splits, v_scale,
        heads, dim, window, SPLIT, dim_block, sinks is not None, num_warps=1, **EXACT,
    )  # fmt: skip
    return out


@triton.jit
def to_cache(x, cache, scale):
    """x in the cache's dtype; scaled if that is float8."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return nearest(tl.div_rn(x.to(tl.float32), scale))
    else:
        return x.to(cache.dtype.element_ty)


@triton.jit
def store_kernel(
    k_ptr, v_ptr, k_cache, v_cache, slot_ptr, k_stride, k_head_stride, v_stride, v_head_stride, k_scale, v_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, HEADS_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys and values of one token into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, DIM_BLOCK)[None, :]
    inside = (head < HEADS) & (column < DIM)
    offset = ((slot // PAGE * HEADS + head) * PAGE + slot % PAGE) * DIM + column
    k = tl.load(k_ptr + token * k_stride + head * k_head_stride + column, mask=inside)
    v = tl.load(v_ptr + token * v_stride + head * v_head_stride + column, mask=inside)
    tl.store(k_cache + offset, to_cache(k, k_cache, k_scale), mask=inside)
    tl.store(v_cache + offset, to_cache(v, v_cache, v_scale), mask=inside)


@attention.store_kv.implement("triton", device="cuda")
def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """k and v may be slices of one tensor [T, ...]."""
    tokens, heads, dim = k.shape
    if tokens:
        heads_block, dim_block = triton.next_power_of_2(heads), triton.next_power_of_2(dim)
        store_kernel[(tokens,)](
            k, v, k_cache, v_cache, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_scale, v_scale,
            heads, dim, k_cache.shape[2], heads_block, dim_block, num_warps=warps(heads_block * dim_block), **EXACT,
        )  # fmt: skip


@triton.jit
def prepared_heads(
    x_ptr, weight_ptr, eps, head, column, inside, cos, sin,
    DIM: tl.constexpr, ROT: tl.constexpr, NORM: tl.constexpr, COUNT: tl.constexpr, INTERLEAVED: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """COUNT heads [H,1] x elements [1,D] of x_ptr, heads STRIDE apart, normed, rounded to their dtype, rotated: [H,D]
    float32.

    NORM: 0 none, 1 of each head, 2 of all heads together, 3 of each head after the rotation.
    """
    first, partner_column, _ = pairing(column, ROT, INTERLEAVED)
    x = tl.load(x_ptr + head * STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + head * STRIDE + partner_column, mask=inside, other=0.0).to(tl.float32)
    if (NORM == 1) | (NORM == 2):
        square = tl.sum(x * x, 1)
        if NORM == 2:
            root = tl.rsqrt(tl.sum(square, 0) / (COUNT * DIM) + eps)
            weight_row = weight_ptr + head * DIM
        else:
            root = tl.rsqrt(square / DIM + eps)[:, None]
            weight_row = weight_ptr + head * 0
        weight = tl.load(weight_row + column, mask=inside, other=0.0).to(tl.float32)
        partner_weight = tl.load(weight_row + partner_column, mask=inside, other=0.0).to(tl.float32)
        x = (x * root * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
        partner = (partner * root * partner_weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    x = tl.where(column < ROT, rotate(x, partner, cos, sin, first), x)
    if NORM == 3:
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        root = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        x = x * root * tl.load(weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32)
    return x


@triton.jit
def norm_rope_store_kernel(
    qkv_ptr, q_weight, k_weight, eps, table_ptr, position_ptr, k_cache, v_cache, slot_ptr, q_out, qkv_stride,
    k_scale, v_scale,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, Q_STRIDE: tl.constexpr,
):  # fmt: skip
    """One token: its queries out, its keys and values into their slot."""
    token = tl.program_id(0).to(tl.int64)
    qkv = qkv_ptr + token * qkv_stride
    column = tl.arange(0, DIM_BLOCK)[None, :]
    _, _, angle = pairing(column, ROT, INTERLEAVED)
    row = table_ptr + tl.load(position_ptr + token) * ROT
    cos = tl.load(row + angle, mask=column < ROT, other=1.0)
    sin = tl.load(row + ROT // 2 + angle, mask=column < ROT, other=0.0)
    head = tl.arange(0, Q_BLOCK)[:, None]
    inside = (head < Q_HEADS) & (column < DIM)
    q = prepared_heads(
        qkv, q_weight, eps, head, column, inside, cos, sin, DIM, ROT, NORM, Q_HEADS, INTERLEAVED,
        Q_STRIDE,
    )  # fmt: skip
    tl.store(q_out + (token * Q_HEADS + head) * DIM + column, q.to(q_out.dtype.element_ty), mask=inside)
    slot = tl.load(slot_ptr + token)
    head = tl.arange(0, K_BLOCK)[:, None]
    inside = (head < K_HEADS) & (column < DIM)
    k = prepared_heads(
        qkv + Q_HEADS * Q_STRIDE, k_weight, eps, head, column, inside, cos, sin, DIM, ROT, NORM, K_HEADS, INTERLEAVED,
        DIM,
    )  # fmt: skip
    v = tl.load(qkv + Q_HEADS * Q_STRIDE + (K_HEADS + head) * DIM + column, mask=inside)
    offset = ((slot // PAGE * K_HEADS + head) * PAGE + slot % PAGE) * DIM + column
    # rounded to the dtype of the projection first, as a key that is stored by itself
    tl.store(k_cache + offset, to_cache(k.to(qkv_ptr.dtype.element_ty), k_cache, k_scale), mask=inside)
    tl.store(v_cache + offset, to_cache(v, v_cache, v_scale), mask=inside)


@attention.norm_rope_store.implement("triton", device="cuda")
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
    """As the reference, but for the order of the norm's sum."""
    tokens, (kv_heads, page, dim) = qkv.shape[0], k_cache.shape[1:]
    heads = (qkv.shape[1] // dim - 2 * kv_heads) // (2 if gated else 1)
    q = qkv.new_empty(tokens, heads, dim)
    norm = 0 if q_weight is None else 2 if len(q_weight) != dim else 1
    if norm_last and norm == 2:
        raise ValueError("norm_rope_store: a norm after the rotation is of each head")
    if tokens:
        q_block, dim_block = triton.next_power_of_2(heads), triton.next_power_of_2(dim)
        norm_rope_store_kernel[(tokens,)](
            qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, eps, table, positions,
            k_cache, v_cache, slot_mapping, q, qkv.stride(0), k_scale, v_scale,
            heads, kv_heads, dim, table.shape[1], page, 3 if norm and norm_last else norm, interleaved,
            q_block, triton.next_power_of_2(kv_heads), dim_block, 2 * dim if gated else dim,
            num_warps=warps(q_block * dim_block), **EXACT,
        )  # fmt: skip
    return q
