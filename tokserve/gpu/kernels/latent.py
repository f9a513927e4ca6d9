"""Latent attention on the GPU: a product per head, the write of a row into the cache, and attention over the rows.

The attention is that of `attention.py` with other tiles: a tile of rows is read once and is keys and values of all its
query heads.  Splits, their merge and the promise of one arithmetic for decode and prefill are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.attention import LOG2_E, MERGE_STAGES, SPLIT
from tokserve.gpu.kernels.dense import BLOCK_K
from tokserve.gpu.kernels.elementwise import pairing, rotated_heads
from tokserve.gpu.kernels.launch import EXACT, addresses, cdiv, next_power_of_2, tuned, warps
from tokserve.gpu.kernels.sums import NEG_INF, finite, merge, strided_sums, tree_sum
from tokserve.ops import latent
from tokserve.ops.dense import PackedWeight

KEYS = 32  # rows of one tile, which lies in shared memory; part of the arithmetic
WARPS = 8  # part of the arithmetic
VALUES = 256  # elements of a value that one program sums up: the sums of 512, twice, would not fit the registers
SCRATCH = 1 << 28  # bytes of partial results of decode at a time
ALIGN = 4  # rows at a time are a multiple of this, so that tensors of the rows from some row on are aligned


@triton.jit(do_not_specialize=["tokens"])
def linear_heads_kernel(
    x_ptr,
    weights_ptr,
    out_ptr,
    tokens,
    outputs,
    inputs,
    x_stride,
    x_head_stride,
    HEADS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of one head's rows times its weight's transpose."""
    head = tl.program_id(2)
    row, step = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_valid, weight_valid = (row < tokens)[:, None], (output < outputs)[:, None]
    weight_ptr = tl.multiple_of(tl.load(weights_ptr + head).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + head * x_head_stride + step[None, :]
    weight_ptrs = weight_ptr + output.to(tl.int64)[:, None] * inputs + step[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, inputs, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs + at, mask=x_valid, other=0.0)
            weight = tl.load(weight_ptrs + at, mask=weight_valid, other=0.0)
        else:
            remaining = (step < inputs - at)[None, :]
            x = tl.load(x_ptrs + at, mask=x_valid & remaining, other=0.0)
            weight = tl.load(weight_ptrs + at, mask=weight_valid & remaining, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    offset = (row.to(tl.int64)[:, None] * HEADS + head) * outputs + output[None, :]
    valid = (row < tokens)[:, None] & (output < outputs)[None, :]
    tl.store(out_ptr + offset, sums.to(out_ptr.dtype.element_ty), mask=valid)


@latent.linear_heads.implement("cublas", device="cuda")
@latent.linear_heads.implement("triton", device="cuda")
def linear_heads(x: Tensor, packed: Sequence[PackedWeight]) -> Tensor:
    """x may be a slice of a tensor [T, ...]."""
    tokens, heads = x.shape[:2]
    inputs, outputs = packed[0].columns, packed[0].rows
    out = x.new_empty(tokens, heads, outputs)
    if tokens:
        config = tuned("linear", x.device.index, rows=tokens, outputs=outputs, bytes=x.element_size())
        block_m, block_n = config["tile"]
        block_k = config.get("step", BLOCK_K)
        table = addresses(tuple(weight.packed.data_ptr() for weight in packed), x.device)
        linear_heads_kernel[(cdiv(tokens, block_m), cdiv(outputs, block_n), heads)](
            x,
            table,
            out,
            tokens,
            outputs,
            inputs,
            x.stride(0),
            x.stride(1),
            heads,
            inputs % block_k == 0,
            block_m,
            block_n,
            block_k,
            num_warps=config["warps"],
            num_stages=config["stages"],
            **EXACT,
        )
    return out


@triton.jit
def latent_rope_store_kernel(
    q_ptr,
    kv_ptr,
    weight_ptr,
    eps,
    table_ptr,
    position_ptr,
    cache_ptr,
    slot_ptr,
    q_out,
    q_stride,
    kv_stride,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    LATENT: tl.constexpr,
    ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROT_BLOCK: tl.constexpr,
):
    """One token: the rotated part of its queries out, its row into its slot."""
    token = tl.program_id(0).to(tl.int64)
    turned = tl.arange(0, ROT_BLOCK)[None, :]
    _, _, angle = pairing(turned, ROT, INTERLEAVED)
    angles = table_ptr + tl.load(position_ptr + token) * ROT
    cos = tl.load(angles + angle, mask=turned < ROT, other=1.0)
    sin = tl.load(angles + ROT // 2 + angle, mask=turned < ROT, other=0.0)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    inside = (head < HEADS) & (turned < ROT)
    q = rotated_heads(q_ptr + token * q_stride + PLAIN, head, turned, inside, cos, sin, PLAIN + ROT, ROT, INTERLEAVED)
    tl.store(q_out + (token * HEADS + head) * ROT + turned, q.to(q_out.dtype.element_ty), mask=inside)
    kv, row = kv_ptr + token * kv_stride, cache_ptr + tl.load(slot_ptr + token) * (LATENT + ROT)
    one = tl.arange(0, 1)[:, None]
    inside = (one < 1) & (turned < ROT)
    k = rotated_heads(kv + LATENT, one, turned, inside, cos, sin, 0, ROT, INTERLEAVED)
    tl.store(row + LATENT + one + turned, k.to(cache_ptr.dtype.element_ty), mask=inside)
    column = tl.arange(0, LATENT_BLOCK)
    x = tl.load(kv + column, mask=column < LATENT, other=0.0).to(tl.float32)
    root = tl.rsqrt(tree_sum(x * x) / LATENT + eps)
    normed = x * root * tl.load(weight_ptr + column, mask=column < LATENT, other=0.0).to(tl.float32)
    tl.store(row + column, normed.to(cache_ptr.dtype.element_ty), mask=column < LATENT)


@latent.latent_rope_store.implement("triton", device="cuda")
def latent_rope_store(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    table: Tensor,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
) -> Tensor:
    """q and kv may be slices of tensors [T, ...]; as the reference, but for the order of the norm's sum."""
    tokens, heads, width = q.shape
    size, rotated = len(weight), table.shape[1]
    q_rope = q.new_empty(tokens, heads, rotated)
    if tokens:
        blocks = [next_power_of_2(count) for count in (heads, size, rotated)]
        latent_rope_store_kernel[(tokens,)](
            q,
            kv,
            weight,
            eps,
            table,
            positions,
            cache,
            slot_mapping,
            q_rope,
            q.stride(0),
            kv.stride(0),
            heads,
            width - rotated,
            size,
            rotated,
            interleaved,
            *blocks,
            num_warps=warps(blocks[0] * blocks[2]),
            **EXACT,
        )
    return q_rope


@triton.jit
def attend_rows(
    q,
    q_rope,
    position,
    cache_ptr,
    table_ptr,
    split,
    end,
    scale,
    value,
    LATENT: tl.constexpr,
    ROT: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROT_BLOCK: tl.constexpr,
):
    """Queries q [M,L], q_rope [M,R] at `position` [M] over the rows of a split before `end`; elements `value` [1,V] of
    values.  Returns what `attention.attend` does."""
    column, turned = tl.arange(0, LATENT_BLOCK)[None, :], tl.arange(0, ROT_BLOCK)[None, :]
    row_max = tl.full([q.shape[0]], NEG_INF, tl.float32)
    row_sum = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], value.shape[1]], tl.float32)
    for tile in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, end), KEYS):
        key = tile + tl.arange(0, KEYS)
        block = tl.load(table_ptr + key // PAGE, mask=key < end, other=0).to(tl.int64)
        row = (block * PAGE + key % PAGE)[:, None] * (LATENT + ROT)
        valid = (key < end)[:, None]
        rows = tl.load(cache_ptr + row + column, mask=valid & (column < LATENT), other=0.0)
        keys = tl.load(cache_ptr + row + LATENT + turned, mask=valid & (turned < ROT), other=0.0)
        scores = tl.dot(q, tl.trans(rows), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(keys), scores, input_precision="ieee") * scale  # [M,KEYS]
        scores = tl.where(key[None, :] <= position[:, None], scores, NEG_INF)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        probs = tl.exp2(scores - finite(new_max)[:, None])
        rescale = tl.exp2(row_max - finite(new_max))
        row_sum = row_sum * rescale + strided_sums(probs)
        values = tl.load(cache_ptr + row + value, mask=valid & (value < LATENT), other=0.0)
        acc = tl.dot(probs.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["table_stride", "max_splits"])
def latent_decode_kernel(
    q_ptr,
    q_rope_ptr,
    cache_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    part_ptr,
    max_ptr,
    sum_ptr,
    scale,
    table_stride,
    max_splits,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROT: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROT_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A tile of heads of a row with one query, over one split, some elements of the values: partial acc [R,splits,H,L],
    row_max and row_sum [R,splits,H]."""
    row, split, part_of = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.program_id(1) % PARTS
    start, end = tl.load(start_ptr + row).to(tl.int64), tl.load(len_ptr + row)
    if (tl.load(start_ptr + row + 1) - start == 1) & (split * SPLIT < end):
        head = tl.program_id(1) // PARTS * TILE + tl.arange(0, TILE)
        value = part_of * VALUES + tl.arange(0, VALUES)[None, :]
        column, turned = tl.arange(0, LATENT_BLOCK)[None, :], tl.arange(0, ROT_BLOCK)[None, :]
        is_head = head < HEADS
        query = (start * HEADS + head)[:, None]
        q = tl.load(q_ptr + query * LATENT + column, mask=is_head[:, None] & (column < LATENT), other=0.0)
        q_rope = tl.load(q_rope_ptr + query * ROT + turned, mask=is_head[:, None] & (turned < ROT), other=0.0)
        position = tl.full([TILE], 0, tl.int32) + (end - 1)
        part, row_max, row_sum = attend_rows(
            q,
            q_rope,
            position,
            cache_ptr,
            table_ptr + row * table_stride,
            split,
            end,
            scale,
            value,
            LATENT,
            ROT,
            PAGE,
            SPLIT,
            KEYS,
            LATENT_BLOCK,
            ROT_BLOCK,
        )
        offset = (row * max_splits + split) * HEADS + head
        tl.store(part_ptr + offset[:, None] * LATENT + value, part, mask=is_head[:, None] & (value < LATENT))
        if part_of == 0:
            tl.store(max_ptr + offset, row_max, mask=is_head)
            tl.store(sum_ptr + offset, row_sum, mask=is_head)


@triton.jit(do_not_specialize=["rows", "table_stride"])
def latent_prefill_kernel(
    q_ptr,
    q_rope_ptr,
    cache_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    out_ptr,
    rows,
    scale,
    table_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROT: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROT_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of queries (of a row with several) and GROUP of their heads, over all splits, some elements of values."""
    QUERIES: tl.constexpr = TILE // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # long ones, late in their rows, come first
    row = row_of_tile(start_ptr, rows, tile, QUERIES)
    start = tl.load(start_ptr + row)
    queries = tl.load(start_ptr + row + 1) - start
    length = tl.load(len_ptr + row)
    first_query = (tile - (start // QUERIES + row)) * QUERIES
    if (queries > 1) & (first_query < queries):
        slot = tl.arange(0, TILE)
        query, head = first_query + slot // GROUP, tl.program_id(1) // PARTS * GROUP + slot % GROUP
        value = tl.program_id(1) % PARTS * VALUES + tl.arange(0, VALUES)[None, :]
        is_query = (slot < QUERIES * GROUP) & (query < queries) & (head < HEADS)
        column, turned = tl.arange(0, LATENT_BLOCK)[None, :], tl.arange(0, ROT_BLOCK)[None, :]
        place = ((start + query).to(tl.int64) * HEADS + head)[:, None]
        q = tl.load(q_ptr + place * LATENT + column, mask=is_query[:, None] & (column < LATENT), other=0.0)
        q_rope = tl.load(q_rope_ptr + place * ROT + turned, mask=is_query[:, None] & (turned < ROT), other=0.0)
        position = length - queries + query
        end = length - queries + tl.minimum(first_query + QUERIES, queries)  # no query of the tile sees further
        acc = tl.zeros([TILE, VALUES], tl.float32)
        row_max = tl.full([TILE], NEG_INF, tl.float32)
        row_sum = tl.zeros([TILE], tl.float32)
        for split in range(0, (end + SPLIT - 1) // SPLIT):
            part, part_max, part_sum = attend_rows(
                q,
                q_rope,
                position,
                cache_ptr,
                table_ptr + row.to(tl.int64) * table_stride,
                split,
                end,
                scale,
                value,
                LATENT,
                ROT,
                PAGE,
                SPLIT,
                KEYS,
                LATENT_BLOCK,
                ROT_BLOCK,
            )
            acc, row_max, row_sum = merge(acc, row_max, row_sum, part, part_max, part_sum)
        out = acc / tl.where(is_query, row_sum, 1.0)[:, None]
        inside = is_query[:, None] & (value < LATENT)
        tl.store(out_ptr + place * LATENT + value, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["max_splits"])
def latent_merge_kernel(
    part_ptr,
    max_ptr,
    sum_ptr,
    start_ptr,
    len_ptr,
    out_ptr,
    max_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """One query head of one row with one query: its splits in ascending order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(start_ptr + row)
    length = tl.load(len_ptr + row)
    if tl.load(start_ptr + row + 1) - start == 1:
        column = tl.arange(0, DIM_BLOCK)
        acc = tl.zeros([1, DIM_BLOCK], tl.float32)
        row_max = tl.full([1], NEG_INF, tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        for split in tl.range(0, (length + SPLIT - 1) // SPLIT, num_stages=MERGE_STAGES):
            offset = (row * max_splits + split) * HEADS + head + tl.arange(0, 1)
            part = tl.load(part_ptr + offset[:, None] * DIM + column[None, :], mask=column[None, :] < DIM, other=0.0)
            acc, row_max, row_sum = merge(
                acc, row_max, row_sum, part, tl.load(max_ptr + offset), tl.load(sum_ptr + offset)
            )
        out = acc / row_sum[:, None]
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


@latent.latent_attention.implement("triton", device="cuda")
def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    tokens, heads, size = q.shape
    (rows, width), page, rotated = block_tables.shape, cache.shape[1], q_rope.shape[2]
    out = q.new_empty(q.shape)
    if tokens == 0:
        return out
    blocks = max(16, next_power_of_2(size)), max(16, next_power_of_2(rotated))
    values = min(VALUES, blocks[0])
    pieces = cdiv(size, values)
    config = tuned("latent", q.device.index)
    tile = config["tile"]
    shape = (heads, size, rotated, page, SPLIT, KEYS, *blocks, tile, values, pieces)
    options = {"num_warps": WARPS, "num_stages": config["stages"], **EXACT}
    scale, stride = scale * LOG2_E, block_tables.stride(0)
    if tokens > rows:
        group = min(heads, tile)
        latent_prefill_kernel[(tokens // (tile // group) + rows, cdiv(heads, group) * pieces)](
            q, q_rope, cache, block_tables, query_start, seq_lens, out, rows, scale, stride, *shape, group, **options
        )
    max_splits = cdiv(width * page, SPLIT)
    most = max(ALIGN, SCRATCH // (4 * max_splits * heads * size) // ALIGN * ALIGN)
    for first in range(0, rows, most):
        count = min(most, rows - first)
        tables, starts, lens = block_tables[first:], query_start[first:], seq_lens[first:]
        parts = q.new_empty((count, max_splits, heads, size), dtype=torch.float32)
        maxima, row_sums = q.new_empty((2, count, max_splits, heads), dtype=torch.float32).unbind()
        latent_decode_kernel[(count, cdiv(heads, tile) * pieces, max_splits)](
            q,
            q_rope,
            cache,
            tables,
            starts,
            lens,
            parts,
            maxima,
            row_sums,
            scale,
            stride,
            max_splits,
            *shape,
            **options,
        )
        latent_merge_kernel[(count, heads)](
            parts, maxima, row_sums, starts, lens, out, max_splits, heads, size, SPLIT, blocks[0], num_warps=1, **EXACT
        )
    return out
