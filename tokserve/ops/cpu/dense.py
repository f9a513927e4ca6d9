"""The C++ implementations of the ops on packed weights, and their layout: panels of 64 outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import dense
from tokserve.ops.cpu.arena import packed_weights
from tokserve.ops.dense import PackedWeight

PANEL = 64  # rows of a panel of a packed weight


@dense.pack_linear.implement("cpp", device="cpu")
def pack_linear(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedWeight | None = None
) -> PackedWeight:
    """The weight in panels of 64 outputs: [N/64][K][64], or [N/64][K/2][64][2] in bfloat16, padded with zeros."""
    return _packed(weight, False, rows, first, into)


@dense.pack_gated.implement("cpp", device="cpu")
def pack_gated(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedWeight | None = None
) -> PackedWeight:
    """Pack as `pack_linear` does, a panel holding 32 outputs of the gate and below them the 32 that they gate."""
    return _packed(weight, True, rows, first, into)


def _packed(weight: Tensor, gated: bool, rows: int | None, first: int, into: PackedWeight | None) -> PackedWeight:
    if into is None:
        into = _unfilled(len(weight) if rows is None else rows, weight.shape[1], weight.dtype, gated)
    _C.put_rows(weight, into.packed, into.rows, first, gated)
    return into


def _unfilled(rows: int, columns: int, dtype: torch.dtype, gated: bool) -> PackedWeight:
    """A weight without its rows; what pads the last panel is there."""
    if gated and rows % 2:
        raise ValueError("pack_gated: a gated weight has an even number of rows")
    pairs, outputs = dtype == torch.bfloat16, rows // 2 if gated else rows
    packed = packed_weights.empty(_C.packed_size(outputs, columns, pairs, gated), dtype)
    if outputs % (PANEL // 2 if gated else PANEL):
        packed[-_C.packed_size(1, columns, pairs, False) :].zero_()
    return PackedWeight(rows, columns, dtype, packed, panel=PANEL, depth=2 if pairs else 1, gated=gated)


@dense.packed_positions.implement("cpp", device="cpu")
def packed_positions(packed: PackedWeight, first_row: int, elements: Tensor) -> Tensor:
    out = torch.empty_like(elements)
    sizes = packed.rows, packed.columns, packed.panel, packed.depth
    _C.packed_positions(elements, first_row, *sizes, packed.gated, out)
    return out


@dense.linear.implement("cpp", device="cpu")
def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    if x.shape[-1] != packed.columns:
        raise ValueError(f"linear: x has {x.shape[-1]} columns, the weight {packed.columns}")
    rows, columns = x.shape[0], packed.rows
    out = x.new_empty(rows, columns) if out_dtype is None else x.new_empty(rows, columns, dtype=out_dtype)
    _C.linear(x, packed.packed, bias, out)
    return out


@dense.gated_linear.implement("cpp", device="cpu")
def gated_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """Rows of x need not be adjacent."""
    if x.shape[-1] != packed.columns:
        raise ValueError(f"gated_linear: x has {x.shape[-1]} columns, the weight {packed.columns}")
    out = x.new_empty(x.shape[0], packed.rows if activation is None else packed.rows // 2)
    _C.gated_linear(x, packed.packed, bias, activation, out)
    return out


@dense.embedding.implement("cpp", device="cpu")
def embedding(ids: Tensor, packed: PackedWeight, multiplier: float = 1.0) -> Tensor:
    out = packed.packed.new_empty(ids.shape[0], packed.columns)
    _C.embedding(ids, packed.packed, packed.rows, multiplier, out)
    return out
