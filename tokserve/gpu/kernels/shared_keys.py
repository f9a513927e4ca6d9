"""Paged attention of decode steps whose requests share their first pages: keys are read once for several of them.

Chosen by `--ops attention_work=groups`; no GPU has run it yet.  Adjacent rows that have their first pages in common
make a run of up to MEMBERS rows.  An item of work is a split of keys, for all rows of a run if they share it, else for
one row: the same `attend` as in `attention`, on a tile whose rows are those of several requests.  Each item leaves a
part in scratch memory, and a row's parts merge in ascending order: the bits are those of `attention`.

- `runs`: once a step, which rows make runs, from the block tables on the device, so that captured graphs serve any.
- `run_work`: once a step, how many items come before each row.
- `run_splits`: all items, in every layer; `run_merge`: the parts of each row and KV head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.attention import (
    LOG2_E,
    MERGE_STAGES,
    SCRATCH,
    SPLIT,
    WARPS,
    Launch,
    attend,
    attend_rows,
    divide,
    divide_work,
    finished,
    row_of,
    rows_block,
)
from tokserve.gpu.kernels.launch import EXACT, cdiv, next_power_of_2
from tokserve.gpu.kernels.sums import NEG_INF, merge
from tokserve.ops import attention

CHUNK = 64  # entries of block tables that are compared at a time


@triton.jit(do_not_specialize=["rows", "table_stride"])
def runs_kernel(
    table_ptr,
    start_ptr,
    len_ptr,
    run_ptr,
    rows,
    table_stride,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    MEMBERS: tl.constexpr,
    MEMBERS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The runs among MEMBERS rows: [R] splits that another row's items hold, [R] splits that the row's items hold for
    its run, and [R] rows of that run."""
    member = tl.arange(0, MEMBERS_BLOCK)
    row = tl.program_id(0) * MEMBERS + member
    inside = (member < MEMBERS) & (row < rows)
    follows = inside & (member > 0)
    length = tl.load(len_ptr + row, mask=inside, other=0)
    before = tl.load(len_ptr + row - 1, mask=follows, other=0)
    start = tl.load(start_ptr + row, mask=inside, other=0)
    has_token = tl.load(start_ptr + row + 1, mask=inside, other=0) > start
    has_before = start > tl.load(start_ptr + row - 1, mask=follows, other=0)
    pages = tl.minimum(length, before) // SPLIT * (SPLIT // PAGE)  # of splits that both see to their ends
    pages = tl.where(follows & has_token & has_before, pages, 0)
    common = tl.zeros_like(pages)
    for first in range(0, tl.max(pages, 0), CHUNK):
        column = first + tl.arange(0, CHUNK)[None, :]
        mask = column < pages[:, None]
        at = table_ptr + row.to(tl.int64)[:, None] * table_stride + column
        same = mask & (tl.load(at, mask=mask, other=0) == tl.load(at - table_stride, mask=mask, other=1))
        leading = tl.min(tl.where(same, first + CHUNK, column), 1)
        common = tl.where(common == first, leading, common)
    common = common * PAGE // SPLIT
    one, other = member[:, None], member[None, :]
    begins = common == 0
    leader = tl.max(tl.where((other <= one) & begins[None, :], other, 0), 1)
    led = leader[None, :] == one  # [row, rows of its run if it is the leader]
    count = tl.sum((led & inside[None, :]).to(tl.int32), 1)
    shared = tl.min(tl.where(led & ~begins[None, :], common[None, :], 1 << 30), 1)
    shared = tl.where((count > 1) & (leader == member), shared, 0)
    of_leader = tl.sum(tl.where(leader[:, None] == other, shared[None, :], 0), 1)
    tl.store(run_ptr + row, tl.where(leader == member, 0, of_leader), mask=inside)
    tl.store(run_ptr + rows + row, shared, mask=inside)
    tl.store(run_ptr + 2 * rows + row, count, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def run_work_kernel(start_ptr, len_ptr, run_ptr, rows, SPLIT: tl.constexpr, ROWS_BLOCK: tl.constexpr):
    """Items before each row [R+1], behind what `runs_kernel` has stored."""
    index = tl.arange(0, ROWS_BLOCK)
    inside = index < rows
    queries = tl.load(start_ptr + index + 1, mask=inside, other=0) - tl.load(start_ptr + index, mask=inside, other=0)
    splits = (tl.load(len_ptr + index, mask=inside, other=0) + SPLIT - 1) // SPLIT
    items = tl.where(queries > 0, splits - tl.load(run_ptr + index, mask=inside, other=0), 0)
    tl.store(run_ptr + 3 * rows + 1 + index, tl.cumsum(items, 0), mask=inside)
    tl.store(run_ptr + 3 * rows, 0)


@triton.jit(do_not_specialize=["rows", "table_stride", "splits"])
def run_splits_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    run_ptr,
    part_ptr,
    max_ptr,
    sum_ptr,
    rows,
    scale,
    softcap,
    q_stride,
    table_stride,
    splits,
    page_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
):
    """The parts [R,splits,heads,D] of all items."""
    work_ptr = run_ptr + 3 * rows
    slot = tl.arange(0, TILE)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    member, group_head = slot // GROUP, slot % GROUP
    for item in range(tl.program_id(0), tl.load(work_ptr + rows) * KV_HEADS, tl.num_programs(0)):
        number, kv_head = item // KV_HEADS, item % KV_HEADS
        row = row_of(work_ptr, rows, number, ROWS_BLOCK)
        split = tl.load(run_ptr + row) + number - tl.load(work_ptr + row)
        members = tl.where(split < tl.load(run_ptr + rows + row), tl.load(run_ptr + 2 * rows + row), 1)
        valid = member < members
        inside = valid[:, None] & (column < DIM)
        head = kv_head * GROUP + group_head
        token = (tl.load(start_ptr + row) + member).to(tl.int64)
        q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * DIM + column, mask=inside, other=0.0)
        position = tl.load(len_ptr + row + member, mask=valid, other=1) - 1
        acc, row_max, row_sum = attend(
            q,
            position,
            position,
            k_ptr + kv_head * page_stride,
            v_ptr + kv_head * page_stride,
            table_ptr + row.to(tl.int64) * table_stride,
            split,
            split + 1,
            0,
            tl.load(len_ptr + row),
            scale,
            softcap,
            KV_HEADS,
            DIM,
            PAGE,
            0,
            SPLIT,
            KEYS,
            DIM_BLOCK,
            CAPPED,
        )
        line = ((row + member).to(tl.int64) * splits + split) * (GROUP * KV_HEADS) + head
        tl.store(part_ptr + line[:, None] * DIM + column, acc, mask=inside)
        tl.store(max_ptr + line, row_max, mask=valid)
        tl.store(sum_ptr + line, row_sum, mask=valid)


@triton.jit(do_not_specialize=["splits"])
def run_merge_kernel(
    part_ptr,
    max_ptr,
    sum_ptr,
    start_ptr,
    len_ptr,
    out_ptr,
    sinks_ptr,
    v_scale,
    splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """The output of a row and KV head."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(start_ptr + row)
    slot, column = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)[None, :]
    valid = slot < tl.minimum(tl.load(start_ptr + row + 1) - start, 1) * GROUP  # none of a row without a token
    inside = valid[:, None] & (column < DIM)
    head = kv_head * GROUP + slot
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    row_max = tl.full([GROUP_BLOCK], NEG_INF, tl.float32)
    row_sum = tl.zeros([GROUP_BLOCK], tl.float32)
    for split in tl.range(0, (tl.load(len_ptr + row) + SPLIT - 1) // SPLIT, num_stages=MERGE_STAGES):
        line = (row.to(tl.int64) * splits + split) * (GROUP * KV_HEADS) + head
        acc, row_max, row_sum = merge(
            acc,
            row_max,
            row_sum,
            tl.load(part_ptr + line[:, None] * DIM + column, mask=inside, other=0.0),
            tl.load(max_ptr + line, mask=valid, other=NEG_INF),
            tl.load(sum_ptr + line, mask=valid, other=0.0),
        )
    out = finished(acc, row_max, row_sum, sinks_ptr, head, valid, v_scale, SINKS)
    offset = (start.to(tl.int64) * (GROUP * KV_HEADS) + head)[:, None] * DIM + column
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


def shares_keys(launch: Launch, q: Tensor, k_cache: Tensor, block_tables: Tensor, window: int) -> bool:
    """Whether these shapes are those of a decode step that may read keys once for several rows."""
    (tokens, heads, dim), (rows, width), page = q.shape, block_tables.shape, k_cache.shape[2]
    scratch = rows * cdiv(width * page, SPLIT) * heads * dim * 4
    group = heads // k_cache.shape[1]
    return (
        tokens == rows > 1
        and not window
        and SPLIT % page == 0
        and scratch <= SCRATCH
        and launch.shared_tile >= 2 * group
    )


@attention.attention_work.implement("groups", device="cuda")
def group_work(
    q: Tensor, k_cache: Tensor, block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, window: int
) -> Tensor | None:
    """What `attention` needs, or for a decode step [1, 4 R + 1] int32: see `runs_kernel` and `run_work_kernel`."""
    launch, rows, kv_heads = divide(q, k_cache, block_tables), len(seq_lens), k_cache.shape[1]
    if not shares_keys(launch, q, k_cache, block_tables, window):
        return divide_work(q, k_cache, block_tables, query_start, seq_lens, window)
    members = launch.shared_tile // (q.shape[1] // kv_heads)
    runs = seq_lens.new_empty((1, 4 * rows + 1))
    runs_kernel[(cdiv(rows, members),)](
        block_tables,
        query_start,
        seq_lens,
        runs,
        rows,
        block_tables.stride(0),
        k_cache.shape[2],
        SPLIT,
        members,
        next_power_of_2(members),
        CHUNK,
        num_warps=4,
        **EXACT,
    )
    run_work_kernel[(1,)](query_start, seq_lens, runs, rows, SPLIT, rows_block(rows), num_warps=4, **EXACT)
    return runs


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
    work: Tensor | None = None,
) -> Tensor:
    """The op with the arguments of `attend_rows`; with `work` of `group_work`, keys are read once for a run."""
    (rows, heads, dim), (kv_heads, page) = q.shape, k_cache.shape[1:3]
    if bidirectional is not None or work is None or work.dim() == 1:
        rest: tuple[Any, ...] = (scale, window, v_scale, softcap, sinks, bidirectional, work)
        return attend_rows(q, k_cache, v_cache, block_tables, query_start, seq_lens, *rest)
    launch, group = divide(q, k_cache, block_tables), heads // kv_heads
    splits, dim_block = cdiv(block_tables.shape[1] * page, SPLIT), max(16, next_power_of_2(dim))
    parts = q.new_empty((rows * splits * heads, dim), dtype=torch.float32)
    maxima, row_sums = q.new_empty((2, len(parts)), dtype=torch.float32).unbind()
    run_splits_kernel[(launch.programs,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        seq_lens,
        work,
        parts,
        maxima,
        row_sums,
        rows,
        scale * (1.0 if softcap > 0.0 else LOG2_E),
        softcap,
        q.stride(0),
        block_tables.stride(0),
        splits,
        page * dim,
        group,
        kv_heads,
        dim,
        page,
        SPLIT,
        launch.keys,
        dim_block,
        softcap > 0.0,
        launch.shared_tile,
        rows_block(rows),
        num_warps=WARPS,
        num_stages=launch.config["decode_stages"],
        **EXACT,
    )
    out = q.new_empty(q.shape)
    run_merge_kernel[(rows, kv_heads)](
        parts,
        maxima,
        row_sums,
        query_start,
        seq_lens,
        out,
        out if sinks is None else sinks,
        v_scale,
        splits,
        group,
        kv_heads,
        dim,
        SPLIT,
        dim_block,
        sinks is not None,
        next_power_of_2(group),
        num_warps=WARPS,
        **EXACT,
    )
    return out
