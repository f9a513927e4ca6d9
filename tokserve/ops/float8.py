"""References of the float8 (e4m3) ops: rows quantized to float8, and the product of two such matrices.

A row of a weight (an output channel) is quantized once, a row of activations (a token) in every call: symmetric, with
one float32 scale per row that maps its largest magnitude to float8's.  A weight may also be given as float8 with scales
per row or finer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokserve.ops import dense, elementwise
from tokserve.ops.registry import op

MAX = 448.0  # the largest number of e4m3
MIN_MAGNITUDE = 1e-30  # lower bound of a row's largest magnitude: a row of zeros stays zero
STEP = 64  # inputs that an implementation sums at once; groups that share a scale are multiples
# the matrix unit keeps 14 bits of a sum of float8 products; implementations add sums of 64 products in float32
TOLERANCE = {torch.float32: (5e-3, 1e-2), torch.bfloat16: (5e-3, 1e-2), torch.float16: (5e-3, 1e-2)}


@dataclass(frozen=True, slots=True)
class PackedFloat8:
    """A float8 weight [rows, columns] in the layout of the `linear_float8` that it was packed for.

    `packed` and `scales` are in that layout too; those of the reference and of a GPU have scales [G,N] float32, G >= 1:
    of each group of inputs.  `handle`: the implementation's own name of the weight.
    """

    rows: int  # N, outputs
    columns: int  # K, inputs
    packed: Tensor
    scales: Tensor
    group: int  # inputs that share a scale, a multiple of STEP where G > 1; the last group may have fewer
    handle: Any = None


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T,K] as (values [T,K] float8, scales [T] float32) with x close to values * scales; ties go to even.

    A row that holds an infinity or not-a-number has the scale not-a-number.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)  # [T,1]
    finite = largest.isfinite()
    largest = largest.clamp(min=MIN_MAGNITUDE)
    values = (wide * (torch.full_like(largest, MAX) / largest)).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
    return values, torch.where(finite, largest / MAX, torch.nan).squeeze(-1)


@op(tolerance=TOLERANCE, follows="linear_float8")
def pack_linear_float8(weight: Tensor) -> PackedFloat8:
    """The floating weight [N,K] quantized by rows, in the layout of `linear_float8`: here that of `linear`."""
    (rows, columns), (values, scales) = weight.shape, quantize(weight)
    return PackedFloat8(rows, columns, dense.pack_linear.reference(values.float()).packed, scales[None], columns)


@op(tolerance=TOLERANCE, follows="linear_float8")
def pack_scaled_float8(values: Tensor, scales: Tensor, group: int, gated: bool = False) -> PackedFloat8:
    """The float8 weight [N,K] with its scales [G,N] float32, each of `group` inputs, in the layout of `linear_float8`;
    `gated`: in that of `gated_linear_float8`, a gate above what is gated.

    The values are not rounded again.  Where G > 1, `group` is a multiple of STEP.
    """
    rows, columns = values.shape
    return PackedFloat8(rows, columns, dense.pack_linear.reference(values.float()).packed, scales.contiguous(), group)


@op(tolerance=TOLERANCE, follows="linear_float8")
def pack_gated_float8(weight: Tensor) -> PackedFloat8:
    """The floating gate and, below it, what is gated [2I,K], quantized by rows, in the layout of
    `gated_linear_float8`."""
    return pack_linear_float8.reference(weight)


def with_marks(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """The scales [G,N] with not-a-number where a group of `group` values [N,K] holds one: implementations may read any
    byte as a number, and the products of such a group are not-a-number all the same.  Each has the same bits."""
    if bool(scales.isnan().any()):
        scales = scales.masked_fill(scales.isnan(), torch.nan)
    marked = (values.view(torch.uint8) & 0x7F) == 0x7F
    if not marked.any():
        return scales
    rows, columns = values.shape
    padded = torch.nn.functional.pad(marked, (0, -columns % group)).view(rows, len(scales), -1)
    return scales.masked_fill(padded.any(-1).t(), torch.nan)


@op(tolerance=TOLERANCE)
def linear_float8(x: Tensor, packed: PackedFloat8, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T,K] times the packed weight's transpose, plus bias [N]: [T,N], x quantized by rows as the weight is.

    An element is the sum of products * scale of x's row * scale of the weight's row + bias, in float32 and in this
    order, rounded to `out_dtype` (None: x's dtype).  With several groups it is the sum over these, ascending, of
    (sum of products * scale of the weight's group) * scale of x's row + bias.
    """
    values, scales = quantize(x)
    if len(packed.scales) == 1:
        result = _summed(values, packed, 0, packed.columns) * scales[:, None] * packed.scales
    else:
        result = torch.zeros(len(x), packed.rows)
        for group, scale in enumerate(packed.scales):
            result += _summed(values, packed, group * packed.group, (group + 1) * packed.group) * scale
        result *= scales[:, None]
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype or x.dtype)


@op(tolerance=TOLERANCE, follows="linear_float8")
def gated_linear_float8(x: Tensor, packed: PackedFloat8, bias: Tensor | None, activation: str | None) -> Tensor:
    """activation(gate) * up for the `linear_float8` of x [T,K] and a gated weight plus bias [2I]: [T,I].

    The gate's rows are above those of up.  `activation` is "silu" or "gelu_tanh"; the product is rounded to x's dtype
    before it.  None: the product itself, [T,2I].
    """
    return elementwise.gated(linear_float8.reference(x, packed, bias), activation)


def _summed(values: Tensor, packed: PackedFloat8, first: int, end: int) -> Tensor:
    """Sums [T,N] of the products of inputs first..end-1, scales aside."""
    inside = torch.zeros_like(values, dtype=torch.float32)
    inside[:, first:end] = values[:, first:end].float()
    weight = dense.PackedWeight(packed.rows, packed.columns, torch.float32, packed.packed)
    return dense.linear.reference(inside, weight, None)
