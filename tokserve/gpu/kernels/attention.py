"""Paged attention on the GPU: decode and prefill kernels of one arithmetic.

A query's keys come in splits by absolute position, a split in tiles of KEYS keys with an online softmax; splits merge
in ascending order.  Both kernels run the same `attend`, in which a row of a tile is computed by the same operations
whatever the tile's height, so a token has the same bits in decode, in a chunk and in a whole prompt: masked keys get a
weight of exactly zero and change nothing.

- `work`: once a step, how many splits and tiles come before each row, counters, and each program's first row.
- decode (rows with few queries: a token, and its drafts): all (row, KV head, split) lie in a line, which is cut into
  equal runs, one for each program.  A program that has a row's splits from the first on merges them as it goes; one
  that has not leaves each by itself in scratch memory.  The last to finish a row merges what was left, in order.
- prefill (all other rows): programs walk through tiles of queries, each over all its splits.

Rows whose queries see later keys too (images, encoders) have the same kernels, with another bound to the mask.
Lengths are read on the device, so that a captured graph serves any length.  Flash-decoding: Dao et al., 2023.  Names
are FlashAttention's: row_max, row_sum, acc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu import candidates
from tokserve.gpu.kernels.elementwise import tanh
from tokserve.gpu.kernels.launch import (
    cdiv,
    is_dependent,
    is_last_of,
    launch_dependents,
    launched,
    multiprocessors,
    next_power_of_2,
    prefetch,
    tuned,
    wait_for_inputs,
)
from tokserve.gpu.kernels.prompts import by_groups
from tokserve.gpu.kernels.sums import NEG_INF, finite, merge, strided_sums, with_sink
from tokserve.ops import attention

SPLIT = 256  # keys of one partial softmax; part of the arithmetic
KEYS = 64  # keys of one tile; part of the arithmetic
TILE = 64  # query heads of one tile: the minimum of sm_90's matrix unit, with WARPS
LOW_TILE = 16  # the same for decode by mma.sync
PROMPT_TILE = 128  # the same in prefill, with as many rows to a warp, if a head has at most WIDE elements
WIDEST = 256  # elements of a head that leave room to load keys ahead
WIDE = 128
FLOAT32_KEYS, FLOAT32_TILE = 32, 16  # the same in float32, which has no matrix unit: larger tiles spill
WARPS = 4
SCRATCH = 1 << 28  # bytes of partial results that rows with several queries may take; more queries go to prefill
LEAST_ROWS = 16
COMPARED = 4096  # rows times programs that one program of `work_kernel` compares at a time, at most
LINE_BYTES = tl.constexpr(128)  # of the L2 cache
MERGE_STAGES = tl.constexpr(5)  # splits in flight, the one that is merged included
LOG2_E = 1.4426950408889634
LOG2_E_IN_KERNELS = tl.constexpr(LOG2_E)


@triton.jit
def attend(
    q,
    position,
    last_key,
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    last,
    first_key,
    end,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Queries q [M,D] at `position` [M] over the keys of splits first..last-1 that lie in first_key..end-1, each up to
    its `last_key` [M].

    k_ptr, v_ptr: the KV head in page 0; `scale` is for powers of two, unless scores are CAPPED.  Returns the
    undivided acc [M,D], row_max [M] and row_sum [M], all float32.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    row_max, part_max = tl.full([q.shape[0]], NEG_INF, tl.float32), tl.full([q.shape[0]], NEG_INF, tl.float32)
    row_sum, part_sum = tl.zeros([q.shape[0]], tl.float32), tl.zeros([q.shape[0]], tl.float32)
    acc, part = tl.zeros([q.shape[0], DIM_BLOCK], tl.float32), tl.zeros([q.shape[0], DIM_BLOCK], tl.float32)
    start = tl.maximum(first * SPLIT, first_key // KEYS * KEYS)
    for tile in range(start, tl.minimum(last * SPLIT, end), KEYS):
        if (tile % SPLIT == 0) & (tile > start):
            acc, row_max, row_sum = merge(acc, row_max, row_sum, part, part_max, part_sum)
            part_max = tl.full([q.shape[0]], NEG_INF, tl.float32)
            part_sum = tl.zeros([q.shape[0]], tl.float32)
            part = tl.zeros([q.shape[0], DIM_BLOCK], tl.float32)
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
        visible = key[None, :] <= last_key[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, NEG_INF)
        new_max = tl.maximum(part_max, tl.max(scores, 1))
        probs = tl.exp2(scores - finite(new_max)[:, None])
        rescale = tl.exp2(part_max - finite(new_max))
        part_sum = part_sum * rescale + strided_sums(probs)
        v = tl.load(v_ptr + offset, mask=valid, other=0.0).to(q.dtype)
        part = tl.dot(probs.to(v.dtype), v, part * rescale[:, None], input_precision="ieee")
        part_max = new_max
    acc, row_max, row_sum = merge(acc, row_max, row_sum, part, part_max, part_sum)
    return acc, row_max, row_sum


@triton.jit
def finished(acc, row_max, row_sum, sinks_ptr, head, valid, v_scale, SINKS: tl.constexpr):
    """The output [M,D] of merged splits."""
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0) * LOG2_E_IN_KERNELS
        acc, row_sum = with_sink(acc, finite(row_max), row_sum, sink)
    return acc / tl.where(valid, row_sum, 1.0)[:, None] * v_scale


@triton.jit(do_not_specialize=["rows", "packed", "counters", "programs"])
def work_kernel(
    start_ptr,
    len_ptr,
    work_ptr,
    rows,
    packed,
    counters,
    programs,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    PROGRAMS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The step's work: splits of decode before each row [R+1], tiles of prefill before each [R+1], counters of zero
    [R * Hk], and the row that each program of decode begins with [programs].

    A program of this kernel writes the rows of PROGRAMS_BLOCK programs, the first one all else, too.
    """
    wait_for_inputs(DEPENDENT)
    index = tl.arange(0, ROWS_BLOCK)
    inside = index < rows
    start = tl.load(start_ptr + index, mask=inside, other=0)
    queries = tl.load(start_ptr + index + 1, mask=inside, other=0) - start
    length = tl.load(len_ptr + index, mask=inside, other=0)
    launch_dependents(DEPENDENT)
    first = tl.maximum(length - queries + 1 - WINDOW, 0) // SPLIT if WINDOW > 0 else tl.zeros_like(length)
    splits = tl.where((queries > 0) & (queries <= packed), (length + SPLIT - 1) // SPLIT - first, 0)
    up_to = tl.cumsum(splits, 0)
    if tl.program_id(0) == 0:
        tiles = tl.where(queries > packed, (queries + QUERIES - 1) // QUERIES, 0)
        tl.store(work_ptr + index + 1, up_to, mask=inside)
        tl.store(work_ptr + rows + 2 + index, tl.cumsum(tiles, 0), mask=inside)
        tl.store(work_ptr, 0)
        tl.store(work_ptr + rows + 1, 0)
        for at in range(0, counters, ROWS_BLOCK):
            tl.store(work_ptr + 2 * rows + 2 + at + index, tl.zeros([ROWS_BLOCK], tl.int32), mask=at + index < counters)
    total = tl.sum(splits, 0) * KV_HEADS
    run = tl.maximum((total + programs - 1) // programs, 1)
    program = tl.program_id(0) * PROGRAMS_BLOCK + tl.arange(0, PROGRAMS_BLOCK)
    passed = (up_to[None, :] <= (program * run // KV_HEADS)[:, None]) & inside[None, :]
    tl.store(work_ptr + 2 * rows + 2 + counters + program, tl.sum(passed.to(tl.int32), 1), mask=program < programs)


@triton.jit
def row_of(work_ptr, rows, number, ROWS_BLOCK: tl.constexpr):
    """The row that has split, or tile, `number` of all."""
    index = tl.arange(0, ROWS_BLOCK)
    before_next = tl.load(work_ptr + 1 + index, mask=index < rows, other=0)
    return tl.sum(((before_next <= number) & (index < rows)).to(tl.int32), 0)


@triton.jit(do_not_specialize=["rows", "table_stride", "capacity", "lines"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    work_ptr,
    part_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    sinks_ptr,
    both_ways_ptr,
    rows,
    scale,
    softcap,
    v_scale,
    q_stride,
    table_stride,
    capacity,
    lines,
    page_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    SINKS: tl.constexpr,
    BOTH_WAYS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A run of the rows with few queries: their outputs, or parts [programs,capacity,lines,D] until a row is whole.

    A program's part 0 is the merged beginning of the last row in its run, the others are splits of the first row.
    EARLY: the work was made before the kernel that precedes this one, so that it can be read, and keys of earlier steps
    be fetched, while that one runs.
    """
    if EARLY:
        prefetch_split(
            k_ptr,
            v_ptr,
            table_ptr,
            start_ptr,
            len_ptr,
            work_ptr,
            rows,
            table_stride,
            page_stride,
            KV_HEADS,
            DIM,
            PAGE,
            WINDOW,
            SPLIT,
        )
    wait_for_inputs(DEPENDENT)
    if EARLY:
        launch_dependents(DEPENDENT)
    total = tl.load(work_ptr + rows) * KV_HEADS
    run = tl.maximum((total + tl.num_programs(0) - 1) // tl.num_programs(0), 1)
    item = tl.program_id(0) * run
    stop = tl.minimum(item + run, total)
    row = tl.load(work_ptr + 2 * rows + 2 + rows * KV_HEADS + tl.program_id(0))
    slot = tl.arange(0, TILE)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    while item < stop:
        base = tl.load(work_ptr + row)
        count = tl.load(work_ptr + row + 1) - base  # splits of the row; none: it is another kernel's
        if count > 0:
            base *= KV_HEADS
            kv_head = (item - base) // count
            base += kv_head * count
            first, last = item - base, tl.minimum(count, stop - base)  # of its splits, those in this run
            start = tl.load(start_ptr + row)
            queries = tl.load(start_ptr + row + 1) - start
            end = tl.load(len_ptr + row)
            first_key = tl.maximum(end - queries + 1 - WINDOW, 0) if WINDOW > 0 else 0
            query = slot // GROUP
            head = kv_head * GROUP + slot % GROUP
            valid = query < queries
            inside = valid[:, None] & (column < DIM)
            token = (start + query).to(tl.int64)
            q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * DIM + column, mask=inside, other=0.0)
            position = end - queries + query
            last_key = position
            if BOTH_WAYS:
                last_key = tl.where(tl.load(both_ways_ptr + row) != 0, end - 1, position)
            step = tl.where(first == 0, last, 1)
            for split in range(first, last, step):
                beginning = first_key // SPLIT + split
                acc, row_max, row_sum = attend(
                    q,
                    position,
                    last_key,
                    k_ptr + kv_head * page_stride,
                    v_ptr + kv_head * page_stride,
                    table_ptr + row.to(tl.int64) * table_stride,
                    beginning,
                    beginning + step,
                    first_key,
                    end,
                    scale,
                    softcap,
                    KV_HEADS,
                    DIM,
                    PAGE,
                    WINDOW,
                    SPLIT,
                    KEYS,
                    DIM_BLOCK,
                    CAPPED,
                )
                if step == count:
                    out = finished(acc, row_max, row_sum, sinks_ptr, head, valid, v_scale, SINKS)
                    offset = (token * (GROUP * KV_HEADS) + head)[:, None] * DIM + column
                    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)
                else:
                    part = tl.program_id(0).to(tl.int64) * capacity + tl.where(first == 0, 0, 1 + split - first)
                    line = part * lines + slot
                    tl.store(part_ptr + line[:, None] * DIM + column, acc, mask=inside)
                    tl.store(max_ptr + line, row_max, mask=valid)
                    tl.store(sum_ptr + line, row_sum, mask=valid)
            if last - first < count:
                counter = work_ptr + 2 * rows + 2 + row * KV_HEADS + kv_head
                if is_last_of(counter, last - first, count):
                    merge_parts(
                        part_ptr,
                        max_ptr,
                        sum_ptr,
                        out_ptr,
                        sinks_ptr,
                        base,
                        count,
                        run,
                        capacity,
                        lines,
                        start,
                        queries,
                        kv_head,
                        v_scale,
                        GROUP,
                        KV_HEADS,
                        DIM,
                        DIM_BLOCK,
                        SINKS,
                        GROUP_BLOCK,
                    )
            item = base + last
            if last == count:
                row += (kv_head + 1) // KV_HEADS
        else:
            row += 1
    if not EARLY:
        launch_dependents(DEPENDENT)


@triton.jit
def prefetch_split(
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    work_ptr,
    rows,
    table_stride,
    page_stride,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Bring the keys and values of a program's first split, as far as they are of earlier steps, into the L2 cache."""
    total = tl.load(work_ptr + rows) * KV_HEADS
    run = tl.maximum((total + tl.num_programs(0) - 1) // tl.num_programs(0), 1)
    item = tl.program_id(0) * run
    if item < total:
        row = tl.load(work_ptr + 2 * rows + 2 + rows * KV_HEADS + tl.program_id(0))
        base = tl.load(work_ptr + row)
        count = tl.load(work_ptr + row + 1) - base
        at = item - base * KV_HEADS
        end = tl.load(len_ptr + row) - (tl.load(start_ptr + row + 1) - tl.load(start_ptr + row))
        first_key = tl.maximum(end + 1 - WINDOW, 0) if WINDOW > 0 else 0
        key = (first_key // SPLIT + at % count) * SPLIT + tl.arange(0, SPLIT)
        key = tl.maximum(tl.minimum(key, end - 1), 0)
        block = tl.load(table_ptr + row.to(tl.int64) * table_stride + key // PAGE).to(tl.int64)
        offset = at // count * page_stride + (block * (KV_HEADS * PAGE) + key % PAGE) * DIM
        LINE: tl.constexpr = LINE_BYTES // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
        for line in tl.static_range(0, DIM, LINE):
            prefetch(k_ptr + offset + line)
            prefetch(v_ptr + offset + line)


@triton.jit
def merge_parts(
    part_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    sinks_ptr,
    base,
    count,
    run,
    capacity,
    lines,
    start,
    queries,
    kv_head,
    v_scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Merge the parts of one row and KV head, whose first split is item `base` of all, in ascending order."""
    slot, column = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)[None, :]
    valid = slot < GROUP
    inside = valid[:, None] & (column < DIM)
    program = base // run
    merged = tl.minimum(count, (program + 1) * run - base)  # splits in the first part
    for query in range(queries):
        acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
        row_max = tl.full([GROUP_BLOCK], NEG_INF, tl.float32)
        row_sum = tl.zeros([GROUP_BLOCK], tl.float32)
        for number in tl.range(0, count - merged + 1, num_stages=MERGE_STAGES):
            item = base + merged + number - 1  # of a split that lies by itself
            holder = tl.where(number == 0, program, item // run)
            part = holder.to(tl.int64) * capacity + tl.where(number == 0, 0, 1 + item % run)
            line = part * lines + query * GROUP + slot
            acc, row_max, row_sum = merge(
                acc,
                row_max,
                row_sum,
                tl.load(part_ptr + line[:, None] * DIM + column, mask=inside, other=0.0, cache_modifier=".cg"),
                tl.load(max_ptr + line, mask=valid, other=NEG_INF, cache_modifier=".cg"),
                tl.load(sum_ptr + line, mask=valid, other=0.0, cache_modifier=".cg"),
            )
        head = kv_head * GROUP + slot
        out = finished(acc, row_max, row_sum, sinks_ptr, head, valid, v_scale, SINKS)
        offset = ((start + query).to(tl.int64) * (GROUP * KV_HEADS) + head)[:, None] * DIM + column
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "table_stride"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    work_ptr,
    out_ptr,
    sinks_ptr,
    both_ways_ptr,
    rows,
    scale,
    softcap,
    v_scale,
    q_stride,
    table_stride,
    page_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    SINKS: tl.constexpr,
    BOTH_WAYS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Tiles of queries (of rows with many) that share a KV head, each over all its splits."""
    QUERIES: tl.constexpr = TILE // GROUP
    wait_for_inputs(DEPENDENT)
    work_ptr += rows + 1
    tiles = tl.load(work_ptr + rows)
    slot = tl.arange(0, TILE)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    for item in range(tl.program_id(0), tiles * KV_HEADS, tl.num_programs(0)):
        tile = tiles - 1 - item // KV_HEADS  # long ones, late in their rows, come first
        kv_head = item % KV_HEADS
        row = row_of(work_ptr, rows, tile, ROWS_BLOCK)
        start = tl.load(start_ptr + row)
        queries = tl.load(start_ptr + row + 1) - start
        length = tl.load(len_ptr + row)
        first_query = (tile - tl.load(work_ptr + row)) * QUERIES
        query = first_query + slot // GROUP
        valid = (slot < QUERIES * GROUP) & (query < queries)
        inside = valid[:, None] & (column < DIM)
        head = kv_head * GROUP + slot % GROUP
        token = (start + query).to(tl.int64)
        q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * DIM + column, mask=inside, other=0.0)
        position = length - queries + query
        last_key = position
        end = length - queries + tl.minimum(first_query + QUERIES, queries)  # no query of the tile sees further
        if BOTH_WAYS:
            sees_all = tl.load(both_ways_ptr + row) != 0
            last_key = tl.where(sees_all, length - 1, position)
            end = tl.where(sees_all, length, end)
        first_key = tl.maximum(length - queries + first_query + 1 - WINDOW, 0) if WINDOW > 0 else 0
        acc, row_max, row_sum = attend(
            q,
            position,
            last_key,
            k_ptr + kv_head * page_stride,
            v_ptr + kv_head * page_stride,
            table_ptr + row.to(tl.int64) * table_stride,
            first_key // SPLIT,
            (end + SPLIT - 1) // SPLIT,
            first_key,
            end,
            scale,
            softcap,
            KV_HEADS,
            DIM,
            PAGE,
            WINDOW,
            SPLIT,
            KEYS,
            DIM_BLOCK,
            CAPPED,
        )
        out = finished(acc, row_max, row_sum, sinks_ptr, head, valid, v_scale, SINKS)
        offset = (token * (GROUP * KV_HEADS) + head)[:, None] * DIM + column
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)
    launch_dependents(DEPENDENT)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a step of `tokens` of some rows is divided: sizes of tiles, programs, and scratch memory."""

    keys: int
    tile: int  # of decode
    shared_tile: int  # of decode, where rows share keys
    prompt_tile: int
    prompt_warps: int
    packed: int  # queries of a row up to which decode takes it
    programs: int
    capacity: int  # parts of a program
    config: dict[str, Any]


def divide(q: Tensor, cache: Tensor, block_tables: Tensor) -> Launch:
    """The launch, which follows from shapes and dtypes alone."""
    (tokens, heads, dim), (rows, width), (kv_heads, page) = q.shape, block_tables.shape, cache.shape[1:3]
    group, dim_block = heads // kv_heads, max(16, next_power_of_2(dim))
    single = q.dtype == torch.float32
    least = next_power_of_2(group)
    config = tuned("attention", q.device.index, row_bytes=dim_block * cache.element_size(), group=group)
    high = max(FLOAT32_TILE if single else config.get("tile", TILE), least)
    tile = max(LOW_TILE, least) if candidates.is_on("decode_tile") else high
    prompt_tile = max(PROMPT_TILE, least) if dim_block <= WIDE and not single else high
    max_splits = cdiv(width * page, SPLIT)
    programs = min(config["programs"] * multiprocessors(q.device.index), rows * kv_heads * max_splits)
    capacity = 1 + min(cdiv(rows * kv_heads * max_splits, programs), max_splits)
    packed = min(tile // group, max(1, SCRATCH // (programs * capacity * group * dim * 4))) if tokens > rows else 1
    return Launch(
        FLOAT32_KEYS if single else KEYS,
        tile,
        high,
        prompt_tile,
        WARPS * max(1, prompt_tile // TILE),
        packed,
        programs,
        capacity,
        config,
    )


def rows_block(rows: int) -> int:
    """Rows that kernels are compiled for: up to LEAST_ROWS, and each power of two from there on."""
    return max(LEAST_ROWS, int(next_power_of_2(rows)))


@attention.attention_work.implement("triton", device="cuda")
def divide_work(
    q: Tensor, k_cache: Tensor, block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, window: int
) -> Tensor:
    """[2 (R + 1) + R * Hk + programs] int32, see `work_kernel`."""
    launch, (rows, kv_heads) = divide(q, k_cache, block_tables), (len(seq_lens), k_cache.shape[1])
    work = seq_lens.new_empty(2 * (rows + 1) + rows * kv_heads + launch.programs)
    if rows:
        block = max(1, COMPARED // rows_block(rows))
        work_kernel[(cdiv(launch.programs, block),)](
            query_start,
            seq_lens,
            work,
            rows,
            launch.packed,
            rows * kv_heads,
            launch.programs,
            window,
            SPLIT,
            launch.prompt_tile // (q.shape[1] // kv_heads),
            kv_heads,
            rows_block(rows),
            block,
            is_dependent(q.device.index),
            num_warps=4,
            **launched(q.device.index),
        )
    return work


def attend_rows(
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
    """`paged_attention`; q may be a slice of a tensor [T, ...]."""
    (tokens, heads, dim), rows, (kv_heads, page) = q.shape, len(seq_lens), k_cache.shape[1:3]
    out = q.new_empty(q.shape)
    if tokens == 0:
        return out
    is_early = work is not None and is_dependent(q.device.index) > 0 and candidates.is_on("decode_early")
    if work is None:
        work = divide_work(q, k_cache, block_tables, query_start, seq_lens, window)
    launch, group = divide(q, k_cache, block_tables), heads // kv_heads
    dim_block = max(16, next_power_of_2(dim))
    shape = (group, kv_heads, dim, page, window, SPLIT, launch.keys, dim_block, softcap > 0.0)
    scale *= 1.0 if softcap > 0.0 else LOG2_E  # capped scores are multiplied by it in the kernel
    inputs = (q, k_cache, v_cache, block_tables, query_start, seq_lens, work)
    outputs = (out, out if sinks is None else sinks, seq_lens if bidirectional is None else bidirectional)
    strides, flags = (q.stride(0), block_tables.stride(0)), (sinks is not None, bidirectional is not None)
    if tokens > rows and by_groups.fits(q, k_cache, v_cache, (launch.prompt_tile, launch.keys), softcap, bidirectional):
        scales, sizes = (scale, v_scale), (window, SPLIT, launch.keys, rows_block(rows))
        by_groups.attend_prompts(q, (k_cache, v_cache), inputs[3:], out, sinks, scales, sizes)
    elif tokens > rows:
        tiles = tokens // (launch.prompt_tile // group) + rows
        prefill_kernel[(min(multiprocessors(q.device.index), tiles * kv_heads),)](
            *inputs,
            *outputs,
            rows,
            scale,
            softcap,
            v_scale,
            *strides,
            page * dim,
            *shape,
            launch.prompt_tile,
            *flags,
            rows_block(rows),
            is_dependent(q.device.index),
            num_warps=launch.prompt_warps,
            num_stages=launch.config["prefill_stages"] if dim_block <= WIDEST else 1,
            **launched(q.device.index),
        )
    lines = launch.packed * group
    parts = q.new_empty((launch.programs * launch.capacity * lines, dim), dtype=torch.float32)
    maxima, row_sums = q.new_empty((2, cdiv(len(parts), 4) * 4), dtype=torch.float32).unbind()
    decode_kernel[(launch.programs,)](
        *inputs,
        parts,
        maxima,
        row_sums,
        *outputs,
        rows,
        scale,
        softcap,
        v_scale,
        *strides,
        launch.capacity,
        lines,
        page * dim,
        *shape,
        launch.tile,
        *flags,
        next_power_of_2(group),
        is_dependent(q.device.index),
        is_early,
        num_warps=WARPS,
        num_stages=launch.config["decode_stages"] if dim_block <= WIDEST else 1,
        **launched(q.device.index),
    )
    return out
