"""The C++ implementations of the int8 ops, and the layout that int8 weights are packed in."""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import quant
from tokserve.ops.cpu.arena import packed_weights
from tokserve.ops.quant import PackedInt8


@quant.quantize_rows.implement("cpp", device="cpu")
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x need not be adjacent."""
    values, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])
    _C.quantize_rows(x, values, scales)
    return values, scales


@quant.pack_linear_int8.implement("cpp", device="cpu")
def pack_linear_int8(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedInt8 | None = None
) -> PackedInt8:
    """Pack in panels of 64 outputs, [N/64][K/4][64][4], each value plus 128: the product's unsigned operand."""
    return _packed_int8(weight, False, rows, first, into)


@quant.pack_gated_int8.implement("cpp", device="cpu")
def pack_gated_int8(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedInt8 | None = None
) -> PackedInt8:
    """Pack as `pack_linear_int8` does, a panel holding 32 outputs of the gate and below them the 32 that they gate."""
    return _packed_int8(weight, True, rows, first, into)


def _packed_int8(weight: Tensor, gated: bool, rows: int | None, first: int, into: PackedInt8 | None) -> PackedInt8:
    if into is None:
        rows, columns = len(weight) if rows is None else rows, weight.shape[1]
        outputs = rows // 2 if gated else rows
        packed = packed_weights.empty(_C.packed_int8_size(outputs, columns, gated), torch.uint8)
        packed[-_C.packed_int8_size(1, columns, False) :].fill_(128)  # the last panel may not be full
        into = PackedInt8(rows, columns, packed, torch.empty(rows))
    _C.put_rows_int8(weight, into.packed, into.scales, first, gated)
    return into


@quant.linear_int8.implement("cpp", device="cpu")
def linear_int8(x: Tensor, packed: PackedInt8, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    if x.shape[-1] != packed.columns:
        raise ValueError(f"linear_int8: x has {x.shape[-1]} columns, the weight {packed.columns}")
    out = torch.empty((x.shape[0], packed.rows), dtype=out_dtype or x.dtype)
    _C.linear_int8(x, packed.packed, packed.scales, bias, out)
    return out


@quant.gated_linear_int8.implement("cpp", device="cpu")
def gated_linear_int8(x: Tensor, packed: PackedInt8, bias: Tensor | None, activation: str | None) -> Tensor:
    """Rows of x need not be adjacent."""
    if x.shape[-1] != packed.columns:
        raise ValueError(f"gated_linear_int8: x has {x.shape[-1]} columns, the weight {packed.columns}")
    out = x.new_empty(x.shape[0], packed.rows if activation is None else packed.rows // 2)
    _C.gated_linear_int8(x, packed.packed, packed.scales, bias, activation, out)
    return out
