"""References of the int8 ops: rows quantized to integers of -127 to 127, and the product of two such matrices.

A row of a weight (an output channel) is quantized once, a row of activations (a token) in every call: symmetric, with
one float32 scale per row.  Products are summed as integers, which is exact in any order; the rest is one fixed float
expression per element.  So every implementation has the reference's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokserve.ops import elementwise
from tokserve.ops.registry import op

LEVELS = 127.0
MIN_MAGNITUDE = 1e-30  # lower bound of a row's largest magnitude: a row of zeros stays zero
DEPTH_BLOCK = 1024  # of K: 1024 products of at most 127 * 127 are below 2^24, so their float32 sum is exact
EXACT = {torch.float32: (0.0, 0.0), torch.bfloat16: (0.0, 0.0), torch.float16: (0.0, 0.0)}


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """An int8 weight [rows, columns] in the layout of the `linear_int8` that it was packed for."""

    rows: int  # N, outputs
    columns: int  # K, inputs
    packed: Tensor
    scales: Tensor  # [N] float32


@op(tolerance=EXACT)
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T,K] as (int8 values [T,K], float32 scales [T]) with x close to values * scales; ties go to even.

    A row's scale is its largest magnitude / 127.  A row that holds an infinity or not-a-number has the scale
    not-a-number and the values zero.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)  # [T,1]
    finite = largest.isfinite()
    largest = largest.clamp(min=MIN_MAGNITUDE)
    inverse = torch.full_like(largest, LEVELS) / largest  # rounded once; torch rounds number / tensor twice
    values = torch.where(finite, (wide * inverse).round(), 0.0)
    scales = torch.where(finite, largest / LEVELS, torch.nan)
    return values.to(torch.int8), scales.squeeze(-1)


@op(tolerance=EXACT, follows="linear_int8")
def pack_linear_int8(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedInt8 | None = None
) -> PackedInt8:
    """The floating weight [N,K], K at most 131072, quantized by rows, in the layout of `linear_int8`; or some rows of a
    weight, as `pack_linear` takes them."""
    if into is None:
        rows, columns = len(weight) if rows is None else rows, weight.shape[1]
        into = PackedInt8(rows, columns, torch.zeros(rows, columns, dtype=torch.int8), torch.zeros(rows))
    part = slice(first, first + len(weight))
    into.packed[part], into.scales[part] = quantize_rows.reference(weight)
    return into


@op(tolerance=EXACT)
def linear_int8(x: Tensor, packed: PackedInt8, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T,K] times the packed weight's transpose, plus bias [N]: [T,N], x quantized as `quantize_rows` does.

    An element is float32(sum of products) * scale of x's row * scale of the weight's row + bias, in float32 and in this
    order, rounded to `out_dtype` (None: x's dtype).
    """
    values, scales = quantize_rows.reference(x)
    sums = torch.zeros(x.shape[0], packed.rows, dtype=torch.int32)
    for start in range(0, packed.columns, DEPTH_BLOCK):
        part = slice(start, start + DEPTH_BLOCK)
        sums += torch.mm(values[:, part].float(), packed.packed[:, part].float().t()).to(torch.int32)
    result = sums.float() * scales[:, None] * packed.scales
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype or x.dtype)


@op(tolerance=EXACT, follows="gated_linear_int8")
def pack_gated_int8(
    weight: Tensor, rows: int | None = None, first: int = 0, into: PackedInt8 | None = None
) -> PackedInt8:
    """Pack a gate and, below it, what is gated [2I,K], as `pack_linear_int8` does, in the layout of
    `gated_linear_int8`."""
    return pack_linear_int8.reference(weight, rows, first, into)


@op(tolerance=elementwise.TOLERANCE)
def gated_linear_int8(x: Tensor, packed: PackedInt8, bias: Tensor | None, activation: str | None) -> Tensor:
    """activation(gate) * up for the `linear_int8` of x [T,K] and a gated weight plus bias [2I] (gate, then up): [T,I].

    `activation` is "silu" or "gelu_tanh".  The product is rounded to x's dtype before it: bit for bit what
    `silu_mul` or `gelu_mul` of `linear_int8` is.  None: the product itself, [T,2I], bit for bit that of `linear_int8`.
    """
    return elementwise.gated(linear_int8.reference(x, packed, bias), activation)
