"""A padded batch as the sequences in it, and where each token of a sequence is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.train.tree import Int32, Int64


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """`cells[i]`: indices of the tokens of `sequences[i]` in the flattened batch [B * L], ascending."""

    sequences: list[Int32]
    cells: list[Int64]


def unpad(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, *, vocab: int, positions: int
) -> PaddedBatch:
    """The sequences of ids [B, L] at the places that the mask [B, L] does not hide.  Raises ValueError.

    A sequence's positions are counted from 0, whatever `position_ids` [B, L] or [1, L] begins with; there a 0 begins
    another sequence of the same row.  Without them the mask of a row is one run of ones, padding before it and after.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, length], got {list(input_ids.shape)}")
    ids = input_ids.detach().cpu().numpy()
    visible = np.ones(ids.shape, np.bool_) if attention_mask is None else _mask(attention_mask, ids.shape)
    table = None if position_ids is None else _positions(position_ids, ids.shape)
    sequences, cells = [], []
    for row in range(len(ids)):
        columns = np.flatnonzero(visible[row])
        for part in _parts(row, columns, None if table is None else table[row, columns]):
            tokens = ids[row, part]
            if tokens.min() < 0 or tokens.max() >= vocab:
                raise ValueError(f"input_ids[{row}] holds an id outside the vocabulary of {vocab}")
            if len(tokens) > positions:
                raise ValueError(f"input_ids[{row}] has {len(tokens)} tokens; the model has {positions} positions")
            sequences.append(tokens.astype(np.int32))
            cells.append(row * ids.shape[1] + part)
    return PaddedBatch(sequences, cells)


def packed_positions(
    shape: tuple[int, ...], position_ids: Tensor | None, ends_q: Tensor | None, ends_k: Tensor | None, *, masked: bool
) -> Tensor | None:
    """`position_ids`, or those [1, L] of a row of sequences one after the other whose ends are given, as flash
    attention takes them: int [n + 1], from 0 to L.  `masked`: there is a mask, too.  Raises ValueError."""
    if ends_q is None and ends_k is None:
        return position_ids
    if ends_q is None or ends_k is None or not torch.equal(ends_q, ends_k):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together, and be the same")
    ends = ends_q.detach().cpu().numpy().astype(np.int64)
    if masked or len(shape) != 2 or shape[0] != 1:
        raise ValueError("cu_seq_lens_q are of one row without attention_mask")
    if ends.ndim != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != shape[1] or (np.diff(ends) < 1).any():
        raise ValueError(f"cu_seq_lens_q must rise from 0 to the row's {shape[1]} tokens, got {ends.tolist()}")
    positions = np.arange(shape[1]) - np.repeat(ends[:-1], np.diff(ends))
    if position_ids is None:
        return torch.from_numpy(positions)[None]
    starts = np.flatnonzero(_positions(position_ids, shape)[0][1:] == 0) + 1
    if not np.array_equal(starts, ends[1:-1]):
        raise ValueError(f"position_ids begin sequences at {starts.tolist()}, cu_seq_lens_q at {ends[1:-1].tolist()}")
    return position_ids


def _mask(attention_mask: Tensor, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    if tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {list(shape)}, got {list(attention_mask.shape)}"
        )
    mask = attention_mask.detach().cpu().to(torch.float32).numpy()
    if not np.isin(mask, (0.0, 1.0)).all():
        raise ValueError("attention_mask must hold zeros and ones")
    return mask == 1.0


def _positions(position_ids: Tensor, shape: tuple[int, ...]) -> Int64:
    positions = position_ids.detach().cpu().numpy()
    if positions.ndim != 2 or positions.shape not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids must have the shape of input_ids, {list(shape)}, got {list(positions.shape)}")
    return np.broadcast_to(positions, shape).astype(np.int64)


def _parts(row: int, columns: Int64, positions: Int64 | None) -> list[Int64]:
    """The columns of a row's tokens, sequence by sequence."""
    if not len(columns):
        return []
    if positions is None:
        if columns[-1] - columns[0] + 1 != len(columns):
            raise ValueError(
                f"attention_mask[{row}] hides a token between two others; give position_ids that count the others"
            )
        return [columns]
    starts = np.flatnonzero(positions[1:] == 0) + 1
    broken = np.setdiff1d(np.flatnonzero(np.diff(positions) != 1) + 1, starts)
    if len(broken):
        at = int(columns[broken[0]])
        raise ValueError(f"position_ids[{row}][{at}] must follow the position before it, or be 0")
    return np.split(columns, starts)
