"""How a step's tokens are found in the tables of a device with its own memory, as torch says it.

The host knows which rows run and how far they are; what the rows hold is in tables [slots, ...] on the device, so the
newest token need never come back before the next step is prepared.  Where tables lie in the host's own memory these
ops have no use.  This file must not know plans, requests or models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.ops.registry import op

WHOLE = {torch.int32: (0.0, 0.0)}


@op(tolerance=WHOLE)
def edit_rows(table: Tensor, edits: Tensor, values: Tensor) -> None:
    """For each edit (slot, column, start, count) of edits [E,4]: count values from start on go to table[slot, column:].

    All are int32.  No place is named twice.
    """
    for slot, column, start, count in edits.tolist():
        table[slot, column : column + count] = values[start : start + count]


@op(tolerance=WHOLE)
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
    owner = torch.repeat_interleave(slots, counts)
    place = torch.arange(len(owner), dtype=torch.int64) + torch.repeat_interleave(computed - query_start[:-1], counts)
    positions.copy_(place)
    input_ids.copy_(tokens[owner, place])
    slot_mapping.copy_(blocks[owner, place // page].long() * page + place % page)
    seq_lens.copy_(computed + counts)
    block_tables.copy_(blocks[slots, : block_tables.shape[1]])
