"""References of the ops on weights of 4 or 8 bits with a scale per group of inputs: integers, and float8 as stored.

A `QuantizedRows` is what every such format comes to: a weight is factor * scale + minimum, with an integer factor of at
most eight bits, which bfloat16 holds exactly.  Products of factors are summed in float32 within a group, in the order
of `linear`; the sum times the group's scale is added to the output's chain, then the minimum times the sum of the
group's activations.  No weight is rounded, and the formula is the same for every number of rows.  A weight of float8
numbers is number * scale, rounded once to the dtype of the activations; its product is `linear` of that.

Activations stay floats, unless the weight was packed as `rounded`: then a row is rounded to int8, each group with a
scale of its own (`quant.quantize_rows`), products are summed as integers, and a group's sum is multiplied by the row's
scale first.  That has the same bits in every implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokserve.ops import dense, elementwise, quant
from tokserve.ops.registry import op
from tokserve.ops.serial import one_thread

ROWS = 128  # that are rounded at once: they fit a cache
STEP = 8  # groups are multiples of this, or there is one
Factors = tuple[int, ...]
SIGNED: Factors = tuple(range(-8, 8))  # what the codes 0 .. 15 mean: the code - 8
UNSIGNED: Factors = tuple(range(16))
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-5, 8e-3), torch.float16: (2e-5, 1e-3)}


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows [N,K] of one weight: (scales * sub_scales) * factor + mins * sub_mins.

    `codes` [N,K] uint8 index `factors`; `factors` None: they are the bits of int8 factors.  `group` inputs share a
    scale, G = ceil(K / group).  `scales` and `mins` [N,S] are floats of `ratio` groups each, S = ceil(G / ratio);
    `sub_scales` and `sub_mins` [N,G] int8 multiply them by group.  `order` [K] int32: column i belongs to input
    order[i].  `folded`: scales are powers of two that bfloat16 holds exactly with any factor, and there are no minima;
    the product is then bit for bit `linear` of the bfloat16 weight.  `nibbles`: `codes` [N,K/2] have two of 4 bits in a
    byte, the low half first.  `float8`: codes are the bits of e4m3 numbers in place of factors; there are scales, in
    float32, and nothing else; the weight is rounded to x's dtype, and the product is `linear` of that.
    """

    codes: Tensor
    factors: Factors | None
    group: int
    scales: Tensor
    sub_scales: Tensor | None = None
    mins: Tensor | None = None
    sub_mins: Tensor | None = None
    ratio: int = 1
    order: Tensor | None = None
    folded: bool = False
    nibbles: bool = False
    float8: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [N,K] of the matrix."""
        rows, columns = self.codes.shape
        return rows, columns * (1 + self.nibbles)

    def each_code(self) -> Tensor:
        """The codes in a byte each: [N,K]."""
        if not self.nibbles:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)

    def by_group(self) -> tuple[Tensor, Tensor | None]:
        """Scales and minima of every group: [N,G] float32."""
        groups = -(-self.shape[1] // self.group)
        scales = _by_group(self.scales, self.sub_scales, self.ratio, groups)
        return scales, None if self.mins is None else _by_group(self.mins, self.sub_mins, self.ratio, groups)

    def numbers(self) -> Tensor:
        """The factors of the groups: [N,K] int8, or float8."""
        if self.float8:
            return self.codes.view(torch.float8_e4m3fn)
        if self.factors is None:
            return self.codes.view(torch.int8)
        return torch.tensor(self.factors, dtype=torch.int8, device=self.codes.device)[self.each_code().long()]

    def dense(self) -> Tensor:
        """The weight [N,K] in float32, the columns in the order of the inputs."""
        scales, mins = self.by_group()
        weight = self.numbers().float()
        for start in range(0, self.shape[1], self.group):
            part, group = weight[:, start : start + self.group], start // self.group
            part *= scales[:, group, None]
            if mins is not None:
                part += mins[:, group, None]
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)


def _by_group(values: Tensor, parts: Tensor | None, ratio: int, groups: int) -> Tensor:
    spread = values.float() if ratio == 1 else values.float().repeat_interleave(ratio, 1)[:, :groups]
    return spread if parts is None else spread * parts.float()


@op(tolerance={dtype: (0.0, 0.0) for dtype in TOLERANCE})
def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The floating weight [N,K] rounded to the nearest of 16 integers by group of inputs: codes [N,K] uint8, which are
    the integers -8 .. 7 plus 8, and scales [N,G] bfloat16.

    The element of the largest magnitude becomes -8: scale = that element / -8.  A group that is not finite has the
    scale not-a-number.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, -(-columns // group), dtype=torch.bfloat16, device=weight.device)
    for start in range(0, rows, ROWS):
        part = slice(start, start + ROWS)
        codes[part], scales[part] = _rounded_weight(weight[part], group)
    return codes, scales


def _rounded_weight(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes [N,K] and scales [N,G] of some rows."""
    rows, columns = weight.shape
    groups = -(-columns // group)
    wide = torch.nn.functional.pad(weight.float(), (0, groups * group - columns)).view(rows, groups, group)
    low, high = torch.aminmax(wide, dim=-1, keepdim=True)  # [N,G,1]
    extreme = torch.where(high >= -low, high, low)
    scales = torch.where(extreme.isfinite() & low.isfinite(), extreme / -8, torch.nan).to(torch.bfloat16)
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    codes = (wide * inverse).round_().clamp_(-8, 7).nan_to_num_().add_(8).to(torch.uint8)
    return codes.view(rows, -1)[:, :columns].contiguous(), scales.squeeze(-1)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows of a weight in the layout of the `linear_wna16` that they were packed for; the fields are those of
    `QuantizedRows`; `rounded`: activations are."""

    bits: int
    rows: int
    columns: int
    group: int
    ratio: int
    packed: Tensor
    factors: Tensor  # [16] int8
    scales: Tensor
    sub_scales: Tensor | None
    mins: Tensor | None
    sub_mins: Tensor | None
    order: Tensor | None
    folded: bool
    rounded: bool = False
    float8: bool = False


@dataclass(frozen=True, slots=True)
class PackedWna16:
    """A weight [rows, columns] whose rows are those of the parts, one below the other.

    `gated`: it is one part, which an implementation keeps in a layout of its own for `gated_linear_wna16`.
    `handle`: the implementation's own name of the weight, for calls that take many.
    """

    rows: int
    columns: int
    parts: tuple[PackedPart, ...]
    gated: bool = False
    handle: Any = None


@op(tolerance=TOLERANCE, follows="linear_wna16")
def pack_wna16(parts: Sequence[QuantizedRows], rounded: bool = False) -> PackedWna16:
    """The parts of a weight, one below the other, in the layout of `linear_wna16`; `rounded`: activations are."""
    packed = tuple(_packed_rows(part, rounded) for part in parts)
    return PackedWna16(sum(part.rows for part in packed), packed[0].columns, packed)


def _packed_rows(part: QuantizedRows, rounded: bool) -> PackedPart:
    check_float8(part, rounded)
    scales, mins = part.by_group()
    return PackedPart(
        8,
        *part.shape,
        part.group,
        1,
        part.numbers(),
        torch.zeros(16, dtype=torch.int8),
        scales,
        None,
        mins,
        None,
        part.order,
        part.folded,
        rounded,
        part.float8,
    )


def check_float8(part: QuantizedRows, rounded: bool) -> None:
    """Raise ValueError for what float8 weights do not have."""
    if part.float8 and (rounded or part.folded or part.mins is not None or part.order is not None):
        raise ValueError("pack_wna16: a float8 weight has scales only, and activations are not rounded to integers")


@op(tolerance={}, follows="linear_wna16")
def pack_int4(
    weight: Tensor,
    group: int,
    rounded: bool = False,
    rows: int | None = None,
    first: int = 0,
    into: PackedWna16 | None = None,
) -> PackedWna16:
    """`pack_wna16` of the weight [N,K] rounded by `quantize_int4`; or of some rows, as `pack_linear` takes them."""
    columns = weight.shape[1]
    if into is None:
        rows = len(weight) if rows is None else rows
        codes = torch.full((rows, columns), 8, dtype=torch.uint8)
        unfilled = QuantizedRows(codes, SIGNED, group, torch.zeros(rows, -(-columns // group)))
        into = pack_wna16.reference((unfilled,), rounded)
    (part,), filled = into.parts, slice(first, first + len(weight))
    codes, part.scales[filled] = quantize_int4.reference(weight, group)
    part.packed[filled] = codes.view(torch.int8) - 8
    return into


@op(tolerance={}, follows="gated_linear_wna16")
def pack_gated_int4(
    weight: Tensor,
    group: int,
    rounded: bool = False,
    rows: int | None = None,
    first: int = 0,
    into: PackedWna16 | None = None,
) -> PackedWna16:
    """Pack a gate and, below it, what is gated [2I,K], as `pack_int4` does, in the layout of `gated_linear_wna16`."""
    return pack_int4.reference(weight, group, rounded, rows, first, into)


@op(tolerance=TOLERANCE)
def linear_wna16(x: Tensor, packed: PackedWna16, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T,K] times the packed weight's transpose, plus bias [N]: [T,N] in `out_dtype` (None: x's dtype).

    An element is the sum over the groups, ascending, of sum of products * scale + minimum * sum of x, in float32, plus
    bias, rounded once.
    """
    result = torch.cat([_product(x, part) for part in packed.parts], 1)
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype or x.dtype)


def _product(x: Tensor, part: PackedPart) -> Tensor:
    """[T,N] float32.  Every product has one shape, as in `dense.linear`."""
    if part.rounded:
        return _rounded_product(x, part)
    wide = x.float() if part.order is None else x.float()[:, part.order.long()]
    if part.float8:
        weight = part.packed.float() * part.scales.repeat_interleave(part.group, 1)[:, : part.columns]
        return dense.linear.reference(wide, dense.pack_linear.reference(weight.to(x.dtype).float()), None)
    if part.folded:
        weight = part.packed.float() * part.scales.repeat_interleave(part.group, 1)[:, : part.columns]
        return dense.linear.reference(wide, dense.pack_linear.reference(weight), None)
    tokens, tile = len(x), dense.TILE
    rows = torch.zeros(-(-tokens // tile) * tile, part.columns)
    rows[:tokens] = wide
    result = torch.zeros(len(rows), part.rows)
    padding = -part.rows % dense.ALIGN
    for group in range(part.scales.shape[1]):
        columns = slice(group * part.group, (group + 1) * part.group)
        weight = torch.nn.functional.pad(part.packed[:, columns].float().t(), (0, padding)).contiguous()
        inputs = rows[:, columns].contiguous()
        with one_thread():
            for start in range(0, len(rows), tile):
                sums = torch.mm(inputs[start : start + tile], weight)[:, : part.rows]
                result[start : start + tile] += sums * part.scales[:, group]
                if part.mins is not None:
                    totals = inputs[start : start + tile].sum(1, keepdim=True)
                    result[start : start + tile] += totals * part.mins[:, group]
    return result[:tokens]


def _rounded_product(x: Tensor, part: PackedPart) -> Tensor:
    """[T,N] float32 of x rounded by group.  In float64, sums of the integers are exact, and so is a product of floats,
    so that what is added is rounded once, as by a fused multiply-add."""
    wide = x.float() if part.order is None else x.float()[:, part.order.long()]
    result = torch.zeros(len(x), part.rows, dtype=torch.float64)
    for group in range(part.scales.shape[1]):
        columns = slice(group * part.group, (group + 1) * part.group)
        values, scales = quant.quantize_rows.reference(wide[:, columns])
        sums = torch.mm(values.double(), part.packed[:, columns].double().t()).float() * scales[:, None]
        result = (result + sums.double() * part.scales[:, group].double()).float().double()
        if part.mins is not None:
            totals = values.double().sum(1).float() * scales
            result = (result + totals.double()[:, None] * part.mins[:, group].double()).float().double()
    return result.float()


@op(tolerance=TOLERANCE, follows="gated_linear_wna16")
def pack_gated_wna16(parts: Sequence[QuantizedRows], rounded: bool = False) -> PackedWna16:
    """Pack a gate and, below it, what is gated [2I,K], as `pack_wna16` does, in the layout of `gated_linear_wna16`."""
    return pack_wna16.reference(parts, rounded)


@op(tolerance=TOLERANCE)
def gated_linear_wna16(x: Tensor, packed: PackedWna16, bias: Tensor | None, activation: str | None) -> Tensor:
    """activation(gate) * up for the `linear_wna16` of x [T,K] and a gated weight plus bias [2I] (gate, then up): [T,I].

    `activation` is "silu" or "gelu_tanh".  The product is rounded to x's dtype before it: bit for bit what
    `silu_mul` or `gelu_mul` of `linear_wna16` is.  None: the product itself, [T,2I], bit for bit that of
    `linear_wna16`.
    """
    return elementwise.gated(linear_wna16.reference(x, packed, bias), activation)


@op(tolerance=TOLERANCE, follows="linear_wna16")
def embedding_wna16(ids: Tensor, packed: PackedWna16, dtype: torch.dtype) -> Tensor:
    """Rows ids [T] int64 of a packed weight, rounded to `dtype`: [T,K].  It has no order and is not gated."""
    result = torch.empty(len(ids), packed.columns, dtype=dtype)
    first = 0
    for part in packed.parts:
        inside = (ids >= first) & (ids < first + part.rows)
        rows = ids[inside] - first
        scales = part.scales[rows].repeat_interleave(part.group, 1)[:, : part.columns]
        values = part.packed[rows].float() * scales
        if part.mins is not None:
            values = values + part.mins[rows].repeat_interleave(part.group, 1)[:, : part.columns]
        result[inside] = values.to(dtype)
        first += part.rows
    return result
