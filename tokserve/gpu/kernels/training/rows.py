"""Gradients of norms and activations, softmax, and sums of rows by place.

A program takes one row, or rows one after the other.  The gradients of a norm's weight and bias are sums over rows in
ascending order, in parts of as many rows as the width alone says, which are added in ascending order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.elementwise import ACTIVATIONS, GATED_BLOCK, active, normal_distribution
from tokserve.gpu.kernels.launch import EXACT, cdiv, next_power_of_2, warps
from tokserve.gpu.kernels.sums import tree_sum
from tokserve.ops import gradients

PART = 1 << 16  # elements of the rows of one part, and
LEAST_ROWS = 16  # at least so many rows
WIDEST = 4096  # elements of a row at a time


@triton.jit(do_not_specialize=["rows"])
def norm_gradients_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    carried_ptr,
    out_ptr,
    part_ptr,
    bias_part_ptr,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CARRIED: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """ROWS rows: the gradients of x, and in part_ptr [parts,WIDTH] the sum of those of the weight.  CENTERED: of a norm
    that subtracts the mean; bias_part_ptr gets the sum of those of its bias."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0) * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        at = tl.cast(row, tl.int64) * WIDTH + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if CENTERED:
            x = tl.where(inside, x - tree_sum(x) / WIDTH, 0.0)
            of_bias += grad
        inverse = tl.rsqrt(tree_sum(x * x) / WIDTH + eps)
        normed = x * inverse
        of_weight += grad * normed
        grad = grad * weight
        along = tree_sum(grad * normed) / WIDTH
        if CENTERED:
            grad -= tree_sum(grad) / WIDTH
        grad = (grad - normed * along) * inverse
        if CARRIED:
            grad += tl.load(carried_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=inside)
    part = tl.program_id(0).to(tl.int64) * WIDTH + column
    tl.store(part_ptr + part, of_weight, mask=inside)
    if CENTERED:
        tl.store(bias_part_ptr + part, of_bias, mask=inside)


@triton.jit(do_not_specialize=["parts"])
def sum_parts_kernel(part_ptr, out_ptr, parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of part_ptr [n,parts,WIDTH] over parts, in ascending order: [n,WIDTH]."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    part_ptr += tl.program_id(1).to(tl.int64) * parts * WIDTH
    out_ptr += tl.program_id(1) * WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        total += tl.load(part_ptr + tl.cast(part, tl.int64) * WIDTH + column, mask=inside, other=0.0)
    tl.store(out_ptr + column, total, mask=inside)


def _norm(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carried: Tensor | None, *, centered: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x [T,H], and of the weight and, if it is centered, the bias [1 or 2,H] float32."""
    rows, width = x.shape
    grad, x = grad.contiguous(), x.contiguous()
    carried = None if carried is None else carried.contiguous()
    out, block = torch.empty_like(x), int(next_power_of_2(width))
    size = max(LEAST_ROWS, PART // block)
    parts = x.new_empty((1 + centered, cdiv(rows, size), width), dtype=torch.float32)
    if rows:
        norm_gradients_kernel[(parts.shape[1],)](
            grad,
            x,
            weight,
            x if carried is None else carried,
            out,
            parts[0],
            parts[-1],
            rows,
            eps,
            width,
            block,
            size,
            carried is not None,
            centered,
            num_warps=warps(block),
            **EXACT,
        )
    sums = x.new_empty((1 + centered, width), dtype=torch.float32)
    block = min(block, 128)
    sum_parts_kernel[(cdiv(width, block), len(sums))](parts, sums, parts.shape[1], width, block, num_warps=1, **EXACT)
    return out, sums


@gradients.norm_gradients.implement("triton", device="cuda")
def norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carried: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, (of_weight,) = _norm(grad, x, weight, eps, carried, centered=False)
    return out, of_weight


@gradients.layer_norm_gradients.implement("triton", device="cuda")
def layer_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carried: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    out, (of_weight, of_bias) = _norm(grad, x, weight, eps, carried, centered=True)
    return out, of_weight, of_bias


@triton.jit
def slope(x, KIND: tl.constexpr):
    """The derivative of the activation number KIND of ACTIVATIONS."""
    if KIND == 0:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        return sigmoid + x * sigmoid * (1.0 - sigmoid)
    elif KIND == 1:
        inner = (x + x * x * x * 0.044715) * 0.7978845608028654  # sqrt(2 / pi)
        share = 1.0 / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh(inner)) / 2
        steepness = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
        return share + x * 2.0 * share * (1.0 - share) * steepness
    elif KIND == 2:
        return normal_distribution(x) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327  # 1 / sqrt(2 pi)
    else:
        positive = tl.where(x > 0.0, 1.0, 0.0)
        return positive if KIND == 3 else 2.0 * x * positive


@triton.jit
def activation_gradients_kernel(
    grad_ptr, x_ptr, out_ptr, inner, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK elements of one row of x: act(x[:inner]), GATED: times x[inner:]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    grad = tl.load(grad_ptr + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    at = row * (2 * inner if GATED else inner) + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + at + inner, mask=inside, other=0.0).to(tl.float32)
        of_up = grad * active(x, KIND)
        tl.store(out_ptr + at + inner, of_up.to(out_ptr.dtype.element_ty), mask=inside)
        of_gate = grad * slope(x, KIND) * up
    else:
        of_gate = grad * slope(x, KIND)
    tl.store(out_ptr + at, of_gate.to(out_ptr.dtype.element_ty), mask=inside)


@gradients.activation_gradients.implement("triton", device="cuda")
def activation_gradients(grad: Tensor, x: Tensor, activation: str, gated: bool = False) -> Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    (rows, inner), out = grad.shape, torch.empty_like(x)
    if rows:
        block = min(GATED_BLOCK, int(next_power_of_2(inner)))
        activation_gradients_kernel[(rows, cdiv(inner, block))](
            grad, x, out, inner, ACTIVATIONS.index(activation), gated, block, num_warps=warps(block), **EXACT
        )
    return out


@triton.jit
def softmax_kernel(x_ptr, width, BLOCK: tl.constexpr):
    """One row, in place."""
    row = x_ptr + tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(row + start + column, mask=start + column < width, other=float("-inf"))
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(row + start + column, mask=start + column < width, other=float("-inf"))
        total += tl.exp(x - top)
    mass = tree_sum(total)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(row + start + column, mask=inside, other=float("-inf"))
        tl.store(row + start + column, tl.div_rn(tl.exp(x - top), mass), mask=inside)


@gradients.softmax.implement("triton", device="cuda")
def softmax(x: Tensor) -> Tensor:
    (rows, width), adjacent = x.shape, x.contiguous()
    if rows:
        block = min(WIDEST, int(next_power_of_2(width)))
        softmax_kernel[(rows,)](adjacent, width, block, num_warps=warps(block), **EXACT)
    return x if adjacent is x else x.copy_(adjacent)


@triton.jit
def sum_rows_kernel(rows_ptr, order_ptr, end_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """BLOCK elements of a place: the rows order_ptr[i] from where the place before ends, in that order."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(tl.load(end_ptr + place), tl.load(end_ptr + place + 1)):
        row = tl.load(order_ptr + number)
        total += tl.load(rows_ptr + row * width + column, mask=inside, other=0.0)
    tl.store(out_ptr + place * width + column, total, mask=inside)


@gradients.sum_rows.implement("triton", device="cuda")
def sum_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    rows, width = rows.contiguous(), rows.shape[1]
    out = rows.new_empty(count, width)
    if not len(rows):
        return out.zero_()
    ascending, order = torch.sort(places, stable=True)
    ends = torch.searchsorted(ascending, torch.arange(count + 1, device=places.device))
    block = min(GATED_BLOCK, int(next_power_of_2(width)))
    sum_rows_kernel[(count, cdiv(width, block))](rows, order, ends, out, width, block, num_warps=warps(block), **EXACT)
    return out
