"""References of the ops that prepare a step from the slot tables of a device with its own memory.

The host knows which rows run and their lengths; their tokens are in tables [slots, ...] on the device, so that the next
step can be prepared before the newest tokens are back on the host.  A host with tables in its own memory does not need
these ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.ops.registry import op

EXACT = {torch.int32: (0.0, 0.0)}


@op(tolerance=EXACT)
def edit_rows(table: Tensor, edits: Tensor, values: Tensor) -> None:
    """Write values[start : start + count] to table[slot, column:], for each edit (slot, column, start, count) [E,4].

    All are int32.  Edits do not overlap.
    """
    for slot, column, start, count in edits.tolist():
        table[slot, column : column + count] = values[start : start + count]


@op(tolerance=EXACT)
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
    """Fill in a batch: row r has tokens query_start[r] .. query_start[r+1] - 1, from computed[r] of slots[r] on.

    From tokens [S,L] and blocks [S,W]: input_ids, positions and slot_mapping (block * page + offset), int64 [T];
    seq_lens [R] and block_tables [R,W], int32.
    """
    counts = query_start.diff()  # [R]
    slot_of_token = torch.repeat_interleave(slots, counts)
    offset = torch.repeat_interleave(computed - query_start[:-1], counts)
    position = torch.arange(len(slot_of_token), dtype=torch.int64) + offset
    positions.copy_(position)
    input_ids.copy_(tokens[slot_of_token, position])
    slot_mapping.copy_(blocks[slot_of_token, position // page].long() * page + position % page)
    seq_lens.copy_(computed + counts)
    block_tables.copy_(blocks[slots, : block_tables.shape[1]])


@op(tolerance=EXACT)
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
    """Each row goes on by a token: adds 1 to computed [R] int32, and fills in a batch as `prepare_step` does for the
    token of slots[r] at that position, and lengths [R] int64, the number of tokens up to it.

    The last slot is padding and stays at 0.
    """
    computed.copy_(torch.where(slots == len(tokens) - 1, 0, computed + 1))
    starts = torch.arange(len(slots) + 1, dtype=torch.int32)
    prepare_step.reference(
        tokens, blocks, slots, computed, starts, page, input_ids, positions, slot_mapping, seq_lens, block_tables
    )
    lengths.copy_(seq_lens)
