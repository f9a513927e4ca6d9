"""The slot tables on the GPU: edits of rows, and the batch of a step, in one small launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT
from tokserve.ops import step

CHUNK = 1024  # entries per step of a program


@triton.jit(do_not_specialize=["table_stride"])
def edit_kernel(table_ptr, edit_ptr, value_ptr, table_stride, CHUNK: tl.constexpr):
    """Apply one edit of a table."""
    edit = edit_ptr + tl.program_id(0) * 4
    slot, column = tl.load(edit).to(tl.int64), tl.load(edit + 1)
    start, count = tl.load(edit + 2), tl.load(edit + 3)
    for first in range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        value = tl.load(value_ptr + start + at, mask=at < count)
        tl.store(table_ptr + slot * table_stride + column + at, value, mask=at < count)


@step.edit_rows.implement("triton", device="cuda")
def edit_rows(table: Tensor, edits: Tensor, values: Tensor) -> None:
    if len(edits):
        edit_kernel[(len(edits),)](table, edits, values, table.stride(0), CHUNK, num_warps=4, **EXACT)


@triton.jit(do_not_specialize=["token_stride", "block_stride", "width", "table_stride"])
def prepare_kernel(
    token_ptr,
    block_ptr,
    slot_ptr,
    computed_ptr,
    start_ptr,
    id_out,
    position_out,
    mapping_out,
    len_out,
    table_out,
    token_stride,
    block_stride,
    width,
    table_stride,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row: its tokens, its length, its part of the block table."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    computed = tl.load(computed_ptr + row)
    start = tl.load(start_ptr + row)
    count = tl.load(start_ptr + row + 1) - start
    tl.store(len_out + row, computed + count)
    for first in range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        position = computed + at
        token = tl.load(token_ptr + slot * token_stride + position, mask=at < count)
        block = tl.load(block_ptr + slot * block_stride + position // PAGE, mask=at < count).to(tl.int64)
        tl.store(id_out + start + at, token.to(tl.int64), mask=at < count)
        tl.store(position_out + start + at, position.to(tl.int64), mask=at < count)
        tl.store(mapping_out + start + at, block * PAGE + position % PAGE, mask=at < count)
    copy_table(block_ptr + slot * block_stride, table_out + row.to(tl.int64) * table_stride, width, CHUNK)


@triton.jit
def copy_table(source, target, width, CHUNK: tl.constexpr):
    """A row of a block table."""
    for first in range(0, width, CHUNK):
        at = first + tl.arange(0, CHUNK)
        tl.store(target + at, tl.load(source + at, mask=at < width), mask=at < width)


@step.prepare_step.implement("triton", device="cuda")
def prepare_step(
    tokens: Tensor,
    blocks: Tensor,
    slots: Tensor,
    computed: Tensor,
    query_start: Tensor,
    page: int,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    prepare_kernel[(len(slots),)](
        tokens,
        blocks,
        slots,
        computed,
        query_start,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        block_tables,
        tokens.stride(0),
        blocks.stride(0),
        block_tables.shape[1],
        block_tables.stride(0),
        page,
        CHUNK,
        num_warps=4,
        **EXACT,
    )


@triton.jit(do_not_specialize=["token_stride", "block_stride", "width", "table_stride", "padding_slot"])
def advance_kernel(
    token_ptr,
    block_ptr,
    slot_ptr,
    computed_ptr,
    id_out,
    position_out,
    mapping_out,
    length_out,
    len_out,
    table_out,
    token_stride,
    block_stride,
    width,
    table_stride,
    padding_slot,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row: its next token, its length, its part of the block table."""
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    position = tl.where(slot == padding_slot, 0, tl.load(computed_ptr + row) + 1)
    slot = slot.to(tl.int64)
    tl.store(computed_ptr + row, position)
    tl.store(len_out + row, position + 1)
    tl.store(length_out + row, (position + 1).to(tl.int64))
    tl.store(position_out + row, position.to(tl.int64))
    tl.store(id_out + row, tl.load(token_ptr + slot * token_stride + position).to(tl.int64))
    block = tl.load(block_ptr + slot * block_stride + position // PAGE).to(tl.int64)
    tl.store(mapping_out + row, block * PAGE + position % PAGE)
    copy_table(block_ptr + slot * block_stride, table_out + row.to(tl.int64) * table_stride, width, CHUNK)


@step.advance_step.implement("triton", device="cuda")
def advance_step(
    tokens: Tensor,
    blocks: Tensor,
    slots: Tensor,
    computed: Tensor,
    page: int,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    lengths: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    advance_kernel[(len(slots),)](
        tokens,
        blocks,
        slots,
        computed,
        input_ids,
        positions,
        slot_mapping,
        lengths,
        seq_lens,
        block_tables,
        tokens.stride(0),
        blocks.stride(0),
        block_tables.shape[1],
        block_tables.stride(0),
        len(tokens) - 1,
        page,
        CHUNK,
        num_warps=4,
        **EXACT,
    )
