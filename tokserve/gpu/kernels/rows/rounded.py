"""Rows rounded to float8, each with a scale: by a kernel of their own, or by the kernel that computes the rows.

Values are rounded in float32 first, so that the conversion is exact on every GPU.  A row's largest magnitude does not
depend on an order, so its values and scale are the same whichever kernel rounds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu import candidates
from tokserve.gpu.kernels.launch import (
    is_dependent,
    launch_dependents,
    launched,
    next_power_of_2,
    wait_for_inputs,
    warps,
)
from tokserve.gpu.kernels.rows.forms import ASKING, OtherForm
from tokserve.ops import float8

MAX = tl.constexpr(float8.MAX)
MIN_MAGNITUDE = tl.constexpr(float8.MIN_MAGNITUDE)
MOST_WIDTH = 1 << 14  # of a row that an activation's program computes whole: 32 elements a thread
_widths: set[int] = set()  # inputs of the float8 weights that this process has packed


@triton.jit
def nearest(x):
    """The number of e4m3 nearest to the float32 x, ties to even, as float8; past the largest, that.  NaN stays NaN."""
    x = tl.where(x > MAX, MAX, tl.where(x < -MAX, -MAX, x))
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF  # keeps three bits after the first
    small = (x + 24576.0) - 24576.0  # 1.5 * 2^14, whose last bit is 2^-9, as that of the smallest numbers
    rounded = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return tl.where(x == x, rounded, x).to(tl.float8e4nv)


@triton.jit
def store_rounded(x, inside, out_ptrs, scale_ptr):
    """Round a row of float32, zero where it is not `inside`: its values and its scale."""
    largest = tl.max(tl.abs(x), 0)
    has_nan = tl.sum((x != x).to(tl.int32), 0) > 0
    finite = (largest < float("inf")) & (has_nan == 0)
    largest = tl.maximum(largest, MIN_MAGNITUDE)
    tl.store(out_ptrs, nearest(x * tl.div_rn(MAX, largest)), mask=inside)
    tl.store(scale_ptr, tl.where(finite, tl.div_rn(largest, MAX), float("nan")))


@triton.jit
def float8_rows_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One row of WIDTH elements: its values and its scale."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    launch_dependents(DEPENDENT)
    store_rounded(x, inside, out_ptr + row * WIDTH + column, scale_ptr + row)


class RoundedRows(OtherForm):
    """Rows with what they are rounded to: values [T,K] float8 and scales [T].  On trial.

    Kernels may read the rows; none changes rows that a norm or an activation returned.
    """

    rounded: tuple[Tensor, Tensor] | None
    ASKING = ASKING | {Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage_offset, Tensor.contiguous, Tensor.cpu}

    def materialize(self) -> None:
        """Forget what the rows are rounded to: torch may change them."""
        self.rounded = None


def is_rounded(width: int) -> bool:
    """Whether a kernel that computes whole rows of this width rounds them, too: float8 weights have so many inputs."""
    return width in _widths and candidates.is_on("float8_rows")


def note_weight(inputs: int) -> None:
    """Take note of a float8 weight, which is multiplied with rows of so many elements."""
    _widths.add(inputs)


def unwritten(rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for values and scales of so many rows."""
    values = like.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    return values, like.new_empty(rows, dtype=torch.float32)


def with_rounded(rows: Tensor, rounded: tuple[Tensor, Tensor]) -> Tensor:
    """The rows, which the next product takes as values and scales."""
    result: RoundedRows = rows.as_subclass(RoundedRows)
    result.rounded = rounded
    return result


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of x [T,K], unless the kernel before has left them.  Rows of x need not be adjacent."""
    if isinstance(x, RoundedRows) and x.rounded is not None:
        return x.rounded
    rows, width = x.shape
    values, scales = unwritten(rows, width, x)
    if rows:
        block = next_power_of_2(width)
        float8_rows_kernel[(rows,)](
            x,
            values,
            scales,
            x.stride(0),
            width,
            block,
            is_dependent(x.device.index),
            num_warps=warps(block),
            **launched(x.device.index),
        )
    return values, scales
