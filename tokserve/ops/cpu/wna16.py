"""The C++ implementations of the ops on weights of 4 or 8 bits, and the layout that they are packed in (csrc/unpack.h).

Codes and scales are in panels of 64 outputs; of a gated weight a panel holds 32 outputs of the gate and below them the
32 that they gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokserve import _C
from tokserve.ops import float8, wna16
from tokserve.ops.cpu.arena import packed_weights
from tokserve.ops.cpu.dense import PANEL
from tokserve.ops.wna16 import PackedPart, PackedWna16, QuantizedRows


@wna16.quantize_int4.implement("cpp", device="cpu")
def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // group), dtype=torch.bfloat16)
    _C.quantize_int4(weight, group, codes, scales)
    return codes, scales


@wna16.pack_wna16.implement("cpp", device="cpu")
def pack_wna16(parts: Sequence[QuantizedRows], rounded: bool = False) -> PackedWna16:
    return _packed(parts, gated=False, rounded=rounded)


@wna16.pack_gated_wna16.implement("cpp", device="cpu")
def pack_gated_wna16(parts: Sequence[QuantizedRows], rounded: bool = False) -> PackedWna16:
    """Pack several parts, as `pack_wna16` does one."""
    return _packed(parts, gated=len(parts) == 1, rounded=rounded)


@wna16.pack_int4.implement("cpp", device="cpu")
def pack_int4(
    weight: Tensor,
    group: int,
    rounded: bool = False,
    rows: int | None = None,
    first: int = 0,
    into: PackedWna16 | None = None,
) -> PackedWna16:
    return _packed_int4(weight, group, rounded, rows, first, into, gated=False)


@wna16.pack_gated_int4.implement("cpp", device="cpu")
def pack_gated_int4(
    weight: Tensor,
    group: int,
    rounded: bool = False,
    rows: int | None = None,
    first: int = 0,
    into: PackedWna16 | None = None,
) -> PackedWna16:
    return _packed_int4(weight, group, rounded, rows, first, into, gated=True)


def _packed_int4(
    weight: Tensor, group: int, rounded: bool, rows: int | None, first: int, into: PackedWna16 | None, *, gated: bool
) -> PackedWna16:
    into = into or _unfilled(len(weight) if rows is None else rows, weight.shape[1], group, rounded, gated=gated)
    _C.put_rows_int4(weight, group, into.parts[0].packed, into.parts[0].scales, into.rows, first, gated)
    return into


def _unfilled(rows: int, columns: int, group: int, rounded: bool, *, gated: bool) -> PackedWna16:
    """A weight of 4 bits without its rows; what pads the last panel is there."""
    if gated and rows % 2:
        raise ValueError("pack_gated_int4: a gated weight has an even number of rows")
    packed = packed_weights.empty(_C.packed_wna16_size(rows, columns, 4, gated), torch.uint8)
    packed[-_C.packed_wna16_size(1, columns, 4, False) :].zero_()
    outputs, width = (rows // 2, PANEL // 2) if gated else (rows, PANEL)
    panels, groups = -(-outputs // width), -(-columns // group)
    scales = packed_weights.empty(panels * groups * PANEL, torch.bfloat16).view(panels, groups, PANEL)
    scales[-1].zero_()
    factors = torch.tensor(wna16.SIGNED, dtype=torch.int8)
    part = PackedPart(
        4,
        rows,
        columns,
        group,
        1,
        packed,
        factors,
        scales,
        None,
        None,
        None,
        None,
        False,
        rounded,
    )
    handle = _C.Wna16Weight()
    handle.add(*_arguments(part), gated)
    return PackedWna16(rows, columns, (part,), gated, handle)


def packed_float8(values: Tensor, scales: Tensor, group: int, *, gated: bool, rounded: bool) -> PackedWna16:
    """The float8 numbers whose bits are `values` [N,K] uint8, with scales [N,G] float32; `rounded`: rows of x become
    float8 as well."""
    part = _pack(_marked(QuantizedRows(values, None, group, scales, float8=True)), gated, rounded)
    handle = _C.Wna16Weight()
    handle.add(*_arguments(part), gated)
    return PackedWna16(part.rows, part.columns, (part,), gated, handle)


def _packed(parts: Sequence[QuantizedRows], *, gated: bool, rounded: bool) -> PackedWna16:
    for part in parts:
        wna16.check_float8(part, rounded)
    packed, handle = tuple(_pack(_marked(part), gated, rounded) for part in parts), _C.Wna16Weight()
    for one in packed:
        handle.add(*_arguments(one), gated)
    return PackedWna16(sum(one.rows for one in packed), packed[0].columns, packed, gated, handle)


def _marked(part: QuantizedRows) -> QuantizedRows:
    """The part with scales of not-a-number where float8 numbers are that."""
    if not part.float8:
        return part
    return replace(part, scales=float8.with_marks(part.numbers(), part.scales.t(), part.group).t())


def _pack(part: QuantizedRows, gated: bool, rounded: bool) -> PackedPart:
    rows, columns = part.shape
    bits = 8 if part.factors is None else 4
    packed = packed_weights.empty(_C.packed_wna16_size(rows, columns, bits, gated), torch.uint8)
    if part.nibbles and columns % 8 == 0:
        _C.pack_nibbles(part.codes.contiguous(), packed, gated)
    else:
        _C.pack_wna16(part.each_code().contiguous(), bits, packed, gated)
    factors = torch.tensor(part.factors or [0] * 16, dtype=torch.int8)
    sub_scales, mins, sub_mins = (
        None if values is None else _panels(values, gated) for values in (part.sub_scales, part.mins, part.sub_mins)
    )
    order = None if part.order is None else part.order.contiguous()
    return PackedPart(
        bits,
        rows,
        columns,
        part.group,
        part.ratio,
        packed,
        factors,
        _panels(part.scales, gated),
        sub_scales,
        mins,
        sub_mins,
        order,
        part.folded,
        rounded,
        part.float8,
    )


def _panels(values: Tensor, gated: bool) -> Tensor:
    """[N,S] as [panels,S,64], padded with zeros."""
    width = PANEL // 2 if gated else PANEL
    halves = values.chunk(2) if gated else (values,)
    padded = [torch.nn.functional.pad(half, (0, 0, 0, -len(half) % width)) for half in halves]
    panels = torch.cat([half.view(-1, width, values.shape[1]) for half in padded], 1).transpose(1, 2)
    return packed_weights.empty(panels.numel(), values.dtype).view(panels.shape).copy_(panels)


def _arguments(part: PackedPart) -> tuple[object, ...]:
    return (
        part.bits,
        part.rows,
        part.columns,
        part.group,
        part.ratio,
        part.packed,
        part.factors,
        part.scales,
        part.sub_scales,
        part.mins,
        part.sub_mins,
        part.order,
        part.folded,
        part.rounded,
        part.float8,
    )


@wna16.linear_wna16.implement("cpp", device="cpu")
def linear_wna16(x: Tensor, packed: PackedWna16, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    out = torch.empty((x.shape[0], packed.rows), dtype=out_dtype or x.dtype)
    first = 0
    for part in packed.parts:
        _C.linear_wna16(x, *_arguments(part), bias, first, out)
        first += part.rows
    return out


@wna16.gated_linear_wna16.implement("cpp", device="cpu")
def gated_linear_wna16(x: Tensor, packed: PackedWna16, bias: Tensor | None, activation: str | None) -> Tensor:
    """Rows of x need not be adjacent."""
    if packed.gated:
        out = x.new_empty(x.shape[0], packed.rows if activation is None else packed.rows // 2)
        _C.gated_linear_wna16(x, *_arguments(packed.parts[0]), bias, activation, out)
        return out
    both = linear_wna16(x, packed, bias)
    if activation is None:
        return both
    out = x.new_empty(x.shape[0], packed.rows // 2)
    (_C.silu_mul if activation == "silu" else _C.gelu_mul)(both, out)
    return out


@wna16.embedding_wna16.implement("cpp", device="cpu")
def embedding_wna16(ids: Tensor, packed: PackedWna16, dtype: torch.dtype) -> Tensor:
    """The weight is in one part."""
    out = torch.empty((ids.shape[0], packed.columns), dtype=dtype)
    _C.embedding_wna16(ids, *_arguments(packed.parts[0]), out)
    return out
