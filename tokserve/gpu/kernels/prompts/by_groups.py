"""Attention of prompts in which one warp fetches keys and values by TMA while two groups of four attend.  On trial.

Each group has half of a tile of query heads, so one computes powers while the other has the matrix unit.  What is done
to a row is what `attention.attend` does, in the same order: scores, masks, the partial softmax of a split and the merge
of splits.  `attention.prefill_kernel` stays: it is the reference, and serves what does not fit here.

Gluon, Triton's language below Triton, has no interpreter; the kernel is compiled, and its operations are compared.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokserve.gpu import candidates
from tokserve.gpu.kernels.launch import EXACT, multiprocessors, tuned
from tokserve.gpu.kernels.sums import strided_sums

HEADS = 64  # query heads of one group of warps, as many as the matrix unit takes at least
GROUPS = 2
WARPS = 4  # of each group
DIMS = (64, 128)
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
REGISTERS, FETCHING_REGISTERS = 240, 24  # of a thread that attends, of one that fetches
STAGES = gl.constexpr(5)  # tiles of keys, and of values, in shared memory
LOG2_E = gl.constexpr(1.4426950408889634)
NEG_INF = gl.constexpr(float("-inf"))
# Triton 3.6 calls it by another name.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def tile_of_item(
    start_ptr,
    len_ptr,
    work_ptr,
    rows,
    item,
    QUERIES: gl.constexpr,
    KV_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    KEYS: gl.constexpr,
    ROWS_BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Item `item` of the step: its row, KV head and first query, where the row's queries start, their number, the row's
    length, and the keys that queries of the tile see: from `begin`, the first of a tile of keys, up to `end`."""
    tiles = gl.load(work_ptr + rows)
    tile = tiles - 1 - item // KV_HEADS
    index = gl.arange(0, ROWS_BLOCK, gl.BlockedLayout([1], [32], [WARPS], [0]))
    before_next = gl.load(work_ptr + 1 + index, mask=index < rows, other=0)
    row = gl.sum(((before_next <= tile) & (index < rows)).to(gl.int32), 0)
    start = gl.load(start_ptr + row)
    queries = gl.load(start_ptr + row + 1) - start
    length = gl.load(len_ptr + row)
    first_query = (tile - gl.load(work_ptr + row)) * QUERIES
    end = length - queries + gl.minimum(first_query + QUERIES, queries)
    begin = 0
    if WINDOW > 0:
        begin = gl.maximum(length - queries + first_query + 1 - WINDOW, 0) // KEYS * KEYS
    return row, item % KV_HEADS, first_query, start, queries, length, begin, end


@gluon.jit
def fetching(
    k_blocks,
    v_blocks,
    table_ptr,
    start_ptr,
    len_ptr,
    work_ptr,
    rows,
    table_stride,
    keys,
    values,
    k_ready,
    k_free,
    v_ready,
    v_free,
    QUERIES: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    KEYS: gl.constexpr,
    ROWS_BLOCK: gl.constexpr,
):
    """What the warp that fetches does: tiles of keys and values of the program's items, one after the other."""
    count = 0
    for item in range(gl.program_id(0), gl.load(work_ptr + rows) * KV_HEADS, gl.num_programs(0)):
        row, kv_head, _, _, _, _, begin, end = tile_of_item(
            start_ptr, len_ptr, work_ptr, rows, item, QUERIES, KV_HEADS, WINDOW, KEYS, ROWS_BLOCK, 1
        )
        for tile in range(begin, end, KEYS):
            block = gl.load(table_ptr + row.to(gl.int64) * table_stride + tile // PAGE)
            line = (block * KV_HEADS + kv_head) * PAGE + tile % PAGE
            at = count % STAGES
            used = (count // STAGES) & 1 ^ 1
            mbarrier.wait(k_free.index(at), used)
            mbarrier.expect(k_ready.index(at), k_blocks.block_type.nbytes)
            fetch(k_blocks, [line, 0], k_ready.index(at), keys.index(at))
            mbarrier.wait(v_free.index(at), used)
            mbarrier.expect(v_ready.index(at), v_blocks.block_type.nbytes)
            fetch(v_blocks, [line, 0], v_ready.index(at), values.index(at))
            count += 1


@gluon.jit
def finite(row_max):
    """`sums.finite` of maxima of rows."""
    return gl.where(row_max == NEG_INF, 0.0, row_max)


@gluon.jit
def of_rows(x, out: gl.constexpr):
    """Numbers of rows [M], in the layout of the sums of these rows, as a column."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, out)), 1)


@gluon.jit
def merge(acc, row_max, row_sum, part, part_max, part_sum, OUT: gl.constexpr):
    """`sums.merge` of two partial softmaxes, whose accumulators have the layout OUT."""
    new_max = gl.maximum(row_max, part_max)
    rescale, part_rescale = gl.exp2(row_max - finite(new_max)), gl.exp2(part_max - finite(new_max))
    acc = acc * of_rows(rescale, OUT) + part * of_rows(part_rescale, OUT)
    return acc, new_max, row_sum * rescale + part_sum * part_rescale


@gluon.jit
def without_values_from(values, valid):
    """Zeros in place of the values [KEYS,D] from number `valid` on: what memory held before may not be a number, and
    zero times that is not zero.  Both groups of warps write the same."""
    KEYS: gl.constexpr = values.shape[0]
    DIM: gl.constexpr = values.shape[1]
    PART: gl.constexpr = 16  # keys at a time, so that few registers do
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    for first in gl.static_range(0, KEYS, PART):
        part = values.slice(first, PART, 0)
        x = part.load(layout)
        key = first + gl.arange(0, PART, gl.SliceLayout(1, layout))
        part.store(gl.where(gl.expand_dims(key < valid, 1), x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def attending(
    q_ptr,
    start_ptr,
    len_ptr,
    work_ptr,
    out_ptr,
    sinks_ptr,
    rows,
    scale,
    v_scale,
    q_stride,
    queries_in,
    keys,
    values,
    k_ready,
    k_free,
    v_ready,
    v_free,
    LOW: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    WINDOW: gl.constexpr,
    SPLIT: gl.constexpr,
    KEYS: gl.constexpr,
    SINKS: gl.constexpr,
    ROWS_BLOCK: gl.constexpr,
):
    """What a group of four warps does: query heads LOW, ... of the program's tiles, over all their splits."""
    TILE: gl.constexpr = queries_in.shape[1]  # of this group
    DIM: gl.constexpr = queries_in.shape[2]
    QUERIES: gl.constexpr = 2 * TILE // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    q = queries_in.index(LOW // TILE)
    count = 0
    for item in range(gl.program_id(0), gl.load(work_ptr + rows) * KV_HEADS, gl.num_programs(0)):
        _, kv_head, first_query, start, queries, length, begin, end = tile_of_item(
            start_ptr, len_ptr, work_ptr, rows, item, QUERIES, KV_HEADS, WINDOW, KEYS, ROWS_BLOCK, 4
        )
        slot = LOW + gl.arange(0, TILE, gl.SliceLayout(1, LOADED))
        query = first_query + slot // GROUP
        valid = (slot < QUERIES * GROUP) & (query < queries)
        offset = (start + query).to(gl.int64) * q_stride + (kv_head * GROUP + slot % GROUP) * DIM
        column = gl.arange(0, DIM, gl.SliceLayout(0, LOADED))
        offset = gl.expand_dims(offset, 1) + gl.expand_dims(column, 0)
        q.store(gl.load(q_ptr + offset, mask=gl.expand_dims(valid, 1), other=0.0))
        fence_async_shared()

        position = length - queries + first_query + (LOW + gl.arange(0, TILE, ROWS)) // GROUP
        lowest = length - queries + first_query + LOW // GROUP
        highest = length - queries + first_query + (LOW + TILE - 1) // GROUP
        row_max, part_max = gl.full([TILE], NEG_INF, gl.float32, ROWS), gl.full([TILE], NEG_INF, gl.float32, ROWS)
        row_sum, part_sum = gl.full([TILE], 0.0, gl.float32, ROWS), gl.full([TILE], 0.0, gl.float32, ROWS)
        acc, part = gl.zeros([TILE, DIM], gl.float32, OUT), gl.zeros([TILE, DIM], gl.float32, OUT)
        for tile in range(begin, end, KEYS):
            at = count % STAGES
            filled = (count // STAGES) & 1
            if (tile % SPLIT == 0) & (tile > begin):
                acc, row_max, row_sum = merge(acc, row_max, row_sum, part, part_max, part_sum, OUT)
                part_max = gl.full([TILE], NEG_INF, gl.float32, ROWS)
                part_sum = gl.full([TILE], 0.0, gl.float32, ROWS)
                part = gl.zeros([TILE, DIM], gl.float32, OUT)
            mbarrier.wait(k_ready.index(at), filled)
            scores = gl.zeros([TILE, KEYS], gl.float32, SCORES)
            scores = warpgroup_mma(q, keys.index(at).permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_free.index(at), count=1)
            scores = scores * scale
            crosses = tile + KEYS - 1 > lowest
            if WINDOW > 0:
                crosses = crosses | (tile <= highest - WINDOW)
            if crosses:
                key = gl.expand_dims(tile + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES)), 0)
                visible = key <= gl.expand_dims(position, 1)
                if WINDOW > 0:
                    visible = visible & (key > gl.expand_dims(position, 1) - WINDOW)
                scores = gl.where(visible, scores, NEG_INF)
            new_max = gl.maximum(part_max, gl.max(scores, 1))
            probs = gl.exp2(scores - gl.expand_dims(finite(new_max), 1))
            rescale = gl.exp2(part_max - finite(new_max))
            part_sum = part_sum * rescale + gl.convert_layout(strided_sums(probs), ROWS)
            weights = gl.convert_layout(probs.to(q_ptr.dtype.element_ty), gl.DotOperandLayout(0, OUT, 2))
            part = part * of_rows(rescale, OUT)
            mbarrier.wait(v_ready.index(at), filled)
            if tile + KEYS > end:
                without_values_from(values.index(at), end - tile)
            part = warpgroup_mma(weights, values.index(at), part, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(v_free.index(at), count=1)
            part_max = new_max
            count += 1
        acc, row_max, row_sum = merge(acc, row_max, row_sum, part, part_max, part_sum, OUT)

        slot = LOW + gl.arange(0, TILE, gl.SliceLayout(1, OUT))
        query = first_query + slot // GROUP
        valid = (slot < QUERIES * GROUP) & (query < queries)
        head = kv_head * GROUP + slot % GROUP
        row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, OUT))
        if SINKS:
            sink = gl.load(sinks_ptr + head, mask=valid, other=0.0) * LOG2_E
            row_max = gl.convert_layout(finite(row_max), gl.SliceLayout(1, OUT))
            new_max = gl.maximum(row_max, sink)
            rescale = gl.exp2(row_max - new_max)
            acc, row_sum = acc * gl.expand_dims(rescale, 1), row_sum * rescale + gl.exp2(sink - new_max)
        out = acc / gl.expand_dims(gl.where(valid, row_sum, 1.0), 1) * v_scale
        offset = ((start + query).to(gl.int64) * (GROUP * KV_HEADS) + head) * DIM
        offset = gl.expand_dims(offset, 1) + gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, OUT)), 0)
        gl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(valid, 1))


@gluon.jit(do_not_specialize=["rows", "table_stride"])
def prompt_kernel(
    q_ptr,
    k_blocks,
    v_blocks,
    table_ptr,
    start_ptr,
    len_ptr,
    work_ptr,
    out_ptr,
    sinks_ptr,
    rows,
    scale,
    v_scale,
    q_stride,
    table_stride,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
    SPLIT: gl.constexpr,
    KEYS: gl.constexpr,
    HEADS: gl.constexpr,
    SINKS: gl.constexpr,
    ROWS_BLOCK: gl.constexpr,
    QUERY_LAYOUT: gl.constexpr,
    REGISTERS: gl.constexpr,
    FETCHING_REGISTERS: gl.constexpr,
):
    """Tiles of queries (of rows with many) that share a KV head, each over all its splits: `attention.prefill_kernel`.
    k_blocks and v_blocks describe caches of [pages * KV_HEADS * PAGE, DIM]."""
    QUERIES: gl.constexpr = 2 * HEADS // GROUP
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, HEADS, DIM], QUERY_LAYOUT)
    keys = gl.allocate_shared_memory(k_blocks.dtype, [STAGES, KEYS, DIM], k_blocks.layout)
    values = gl.allocate_shared_memory(v_blocks.dtype, [STAGES, KEYS, DIM], v_blocks.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)  # one for each group that attends
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    work_ptr += rows + 1  # tiles of prompts
    gl.warp_specialize(
        [
            (
                attending,
                (
                    q_ptr,
                    start_ptr,
                    len_ptr,
                    work_ptr,
                    out_ptr,
                    sinks_ptr,
                    rows,
                    scale,
                    v_scale,
                    q_stride,
                    queries,
                    keys,
                    values,
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    gl.constexpr(0),
                    GROUP,
                    KV_HEADS,
                    WINDOW,
                    SPLIT,
                    KEYS,
                    SINKS,
                    ROWS_BLOCK,
                ),
            ),
            (
                attending,
                (
                    q_ptr,
                    start_ptr,
                    len_ptr,
                    work_ptr,
                    out_ptr,
                    sinks_ptr,
                    rows,
                    scale,
                    v_scale,
                    q_stride,
                    queries,
                    keys,
                    values,
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    HEADS,
                    GROUP,
                    KV_HEADS,
                    WINDOW,
                    SPLIT,
                    KEYS,
                    SINKS,
                    ROWS_BLOCK,
                ),
            ),
            (
                fetching,
                (
                    k_blocks,
                    v_blocks,
                    table_ptr,
                    start_ptr,
                    len_ptr,
                    work_ptr,
                    rows,
                    table_stride,
                    keys,
                    values,
                    k_ready,
                    k_free,
                    v_ready,
                    v_free,
                    QUERIES,
                    KV_HEADS,
                    PAGE,
                    WINDOW,
                    KEYS,
                    ROWS_BLOCK,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, FETCHING_REGISTERS],
    )


def fits(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tile: tuple[int, int], softcap: float, bidirectional: Tensor | None
) -> bool:
    """Whether prompts are attended to here, in tiles of so many query heads and so many keys."""
    return (
        candidates.is_on("prompt_groups")
        and not triton.knobs.runtime.interpret
        and bool(tuned("launch", q.device.index).get("tma", False))
        and tile[0] == GROUPS * HEADS
        and q.dtype in DTYPES
        and q.dtype == k_cache.dtype == v_cache.dtype
        and q.shape[2] in DIMS
        and k_cache.shape[2] % tile[1] == 0
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and softcap == 0.0
        and bidirectional is None
    )


def attend_prompts(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    step: tuple[Any, ...],
    out: Tensor,
    sinks: Tensor | None,
    scales: tuple[float, float],
    sizes: tuple[int, int, int, int],
) -> None:
    """`attention.prefill_kernel` of what `fits`.  step: block tables, starts and lengths of rows, work; scales: of
    scores, in powers of two, and of values; sizes: a window, keys of a split and of a tile, the rows of a kernel."""
    (tokens, heads, dim), (_, kv_heads, page, _) = q.shape, caches[0].shape
    window, split, keys, rows_block = sizes
    block_tables, *_ = step
    rows, group = len(block_tables), heads // kv_heads
    dtype = DTYPES[q.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([keys, dim], dtype)
    blocks = [TensorDescriptor.from_tensor(cache.view(-1, dim), [keys, dim], layout) for cache in caches]
    tiles = tokens // (GROUPS * HEADS // group) + rows
    prompt_kernel[(min(multiprocessors(q.device.index), tiles * kv_heads),)](
        q,
        *blocks,
        *step,
        out,
        out if sinks is None else sinks,
        rows,
        scales[0],
        scales[1],
        q.stride(0),
        block_tables.stride(0),
        group,
        kv_heads,
        dim,
        page,
        window,
        split,
        keys,
        HEADS,
        sinks is not None,
        rows_block,
        gl.NVMMASharedLayout.get_default_for([HEADS, dim], dtype),
        REGISTERS,
        FETCHING_REGISTERS,
        num_warps=WARPS,
        **EXACT,
    )
