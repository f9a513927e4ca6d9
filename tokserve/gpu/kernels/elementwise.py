"""Norms, rotary embedding and activations on the GPU: a program per row, with the reference's arithmetic.

A sum over a row is one tree whose shape depends on the row's width only, so a row's bits do not depend on other rows.
Nothing is contracted into a fused multiply-add except `tl.fma`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import (
    EXACT,
    cdiv,
    is_dependent,
    launch_dependents,
    launched,
    next_power_of_2,
    wait_for_inputs,
    warps,
)
from tokserve.gpu.kernels.rows import rounded
from tokserve.gpu.kernels.rows.chains import load_product, sums_of
from tokserve.gpu.kernels.rows.rounded import store_rounded
from tokserve.gpu.kernels.sums import tree_sum, tree_sums
from tokserve.ops import elementwise

GATED_BLOCK = 1024  # outputs of one program
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")  # by number


@triton.jit
def tanh(x):
    """Hyperbolic tangent from one exponential, exact at both ends."""
    scaled = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - scaled) / (1.0 + scaled)
    return tl.where(x < 0.0, -size, size)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x_ptr,
    x_bias_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    values_ptr,
    scale_ptr,
    eps,
    multiplier,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINS: tl.constexpr,
    X_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row of WIDTH elements; ADD: the row is x * multiplier + residual, which is written to total too; ROUNDED: the
    norm is written as float8 values with a scale, too.  CHAINS and X_BIAS: as `load_product` takes them."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    size = rows.to(tl.int64) * WIDTH
    x = load_product(x_ptr, x_bias_ptr, row, column, inside, size, CHAINS, X_BIAS, out_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        total = (x * multiplier + residual).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + column, total, mask=inside)
        x = total.to(tl.float32)
    launch_dependents(DEPENDENT)
    if CENTERED:
        x = tl.where(inside, x - tree_sum(x) / WIDTH, 0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tree_sum(x * x) / WIDTH
    normed = x * tl.rsqrt(mean + eps) * weight
    if BIAS:
        normed += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + column, normed, mask=inside)
    if ROUNDED:
        normed = tl.where(inside, normed.to(tl.float32), 0.0)
        store_rounded(normed, inside, values_ptr + row + column, scale_ptr + tl.program_id(0))


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    multiplier: float = 1.0,
    *,
    bias: Tensor | None = None,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    sums, x_bias, chains = sums_of(x)
    sums = sums.contiguous()
    out = x.new_empty(rows, width)
    total = out if residual is None else x.new_empty(rows, width)
    is_rounded = rounded.is_rounded(width)
    float8_rows = rounded.unwritten(rows, width, x) if is_rounded else (out, out)
    if rows:
        block = next_power_of_2(width)
        other = out if residual is None else residual.contiguous()
        norm_kernel[(rows,)](
            sums,
            out if x_bias is None else x_bias,
            other,
            weight,
            weight if bias is None else bias,
            out,
            total,
            *float8_rows,
            eps,
            multiplier,
            rows,
            width,
            block,
            chains,
            x_bias is not None,
            residual is not None,
            centered,
            bias is not None,
            is_rounded,
            is_dependent(x.device.index),
            num_warps=warps(block),
            **launched(x.device.index),
        )
    return rounded.with_rounded(out, float8_rows) if is_rounded else out, total


@elementwise.rms_norm.implement("triton", device="cuda")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, None, weight, eps)[0]


@elementwise.add_rms_norm.implement("triton", device="cuda")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, eps, multiplier)


@elementwise.layer_norm.implement("triton", device="cuda")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _norm(x, None, weight, eps, bias=bias, centered=True)[0]


@elementwise.add_layer_norm.implement("triton", device="cuda")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, eps, multiplier, bias=bias, centered=True)


@triton.jit
def scale_kernel(
    x_ptr, residual_ptr, out_ptr, multiplier, limit, width, ADD: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK elements of one row: x * multiplier, ADD: plus the residual, CAP: through limit * tanh(... / limit)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.program_id(0).to(tl.int64) * width + column
    inside = column < width
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32) * multiplier
    if ADD:
        x += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if CAP:
        x = tanh(tl.div_rn(x, limit)) * limit
    tl.store(out_ptr + offset, x.to(out_ptr.dtype.element_ty), mask=inside)


def _scaled(x: Tensor, residual: Tensor | None, multiplier: float, limit: float) -> Tensor:
    rows, width = x.shape
    x = x.contiguous()
    out = torch.empty_like(x)
    if rows:
        block = min(GATED_BLOCK, next_power_of_2(width))
        other = x if residual is None else residual.contiguous()
        scale_kernel[(rows, cdiv(width, block))](
            x,
            other,
            out,
            multiplier,
            limit,
            width,
            residual is not None,
            limit > 0.0,
            block,
            num_warps=warps(block),
            **EXACT,
        )
    return out


@elementwise.add_residual.implement("triton", device="cuda")
def add_residual(x: Tensor, residual: Tensor, multiplier: float = 1.0) -> Tensor:
    return _scaled(x, residual, multiplier, 0.0)


@elementwise.cap.implement("triton", device="cuda")
def cap(x: Tensor, multiplier: float, limit: float) -> Tensor:
    return _scaled(x, None, multiplier, limit)


@triton.jit
def rotate(x, partner, cos, sin, first):
    """The first element of a pair (`first`) becomes x cos - partner sin, the second x cos + partner sin."""
    return tl.where(first, x * cos - partner * sin, x * cos + partner * sin)


@triton.jit
def pairing(column, ROT: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Say of each element whether it is the first of its pair, where its partner is, and which angle turns it."""
    HALF: tl.constexpr = ROT // 2
    if INTERLEAVED:
        first = column % 2 == 0
        partner = tl.where(column < ROT, column + 1 - column % 2 * 2, column)
        angle = tl.minimum(column // 2, HALF - 1)
    else:
        first = column < HALF
        partner = tl.where(first, column + HALF, tl.where(column < ROT, column - HALF, column))
        angle = column % HALF
    return first, partner, angle


@triton.jit
def rotated_heads(x_ptr, head, column, inside, cos, sin, head_stride, ROT: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Heads [H,1] x elements [1,D] at x_ptr after the rotation, in float32: [H,D]."""
    first, partner_column, _ = pairing(column, ROT, INTERLEAVED)
    x = tl.load(x_ptr + head * head_stride + column, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + head * head_stride + partner_column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(column < ROT, rotate(x, partner, cos, sin, first), x)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    table_ptr,
    position_ptr,
    q_out,
    k_out,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """All query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    _, _, angle = pairing(column, ROT, INTERLEAVED)
    row = table_ptr + tl.load(position_ptr + token) * ROT
    rotated = column < ROT
    cos = tl.load(row + angle, mask=rotated, other=1.0)
    sin = tl.load(row + ROT // 2 + angle, mask=rotated, other=0.0)
    head = tl.arange(0, Q_BLOCK)[:, None]
    inside = (head < Q_HEADS) & (column < DIM)
    q = rotated_heads(q_ptr + token * q_stride, head, column, inside, cos, sin, q_head_stride, ROT, INTERLEAVED)
    tl.store(q_out + (token * Q_HEADS + head) * DIM + column, q.to(q_out.dtype.element_ty), mask=inside)
    head = tl.arange(0, K_BLOCK)[:, None]
    inside = (head < K_HEADS) & (column < DIM)
    k = rotated_heads(k_ptr + token * k_stride, head, column, inside, cos, sin, k_head_stride, ROT, INTERLEAVED)
    tl.store(k_out + (token * K_HEADS + head) * DIM + column, k.to(k_out.dtype.element_ty), mask=inside)


@elementwise.rope.implement("triton", device="cuda")
def rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """q and k may be slices of one tensor [T, ...]."""
    tokens, q_heads, dim = q.shape
    k_heads = k.shape[1]
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if tokens:
        rope_kernel[(tokens,)](
            q,
            k,
            table,
            positions,
            q_out,
            k_out,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            q_heads,
            k_heads,
            dim,
            table.shape[1],
            interleaved,
            next_power_of_2(q_heads),
            next_power_of_2(k_heads),
            next_power_of_2(dim),
            num_warps=warps(next_power_of_2(q_heads * dim)),
            **EXACT,
        )
    return q_out, k_out


@triton.jit
def normal_distribution(x):
    """The normal distribution function: the reference's formula."""
    size = tl.abs(x) * 0.70710678118654752
    t = tl.div_rn(1.0, 1.0 + 0.5 * size)
    p = 0.17087277 * t - 0.82215223
    p = p * t + 1.48851587
    p = p * t - 1.13520398
    p = p * t + 0.27886807
    p = p * t - 0.18628806
    p = p * t + 0.09678418
    p = p * t + 0.37409196
    p = p * t + 1.00002368
    p = p * t - 1.26551223
    tail = 0.5 * t * tl.exp(p - size * size)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def active(x, KIND: tl.constexpr):
    """The activation number KIND of ACTIVATIONS."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        cubic = (x + x * x * x * 0.044715) * 0.7978845608028654  # sqrt(2 / pi)
        return x * 0.5 * (1.0 + tanh(cubic))
    elif KIND == 2:
        return x * normal_distribution(x)
    else:
        positive = tl.where(x < 0.0, 0.0, x)
        return positive if KIND == 3 else positive * positive


@triton.jit
def activate_kernel(
    x_ptr,
    out_ptr,
    values_ptr,
    scale_ptr,
    inner,
    x_stride,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """BLOCK outputs of one row: act(x[:inner]), GATED: times x[inner:]; ROUNDED: all of a row, which is written as
    float8 values with a scale, too."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    x = active(tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32), KIND)
    if GATED:
        x = x * tl.load(x_ptr + row * x_stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    launch_dependents(DEPENDENT)
    x = x.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * inner + column, x, mask=inside)
    if ROUNDED:
        x = tl.where(inside, x.to(tl.float32), 0.0)
        store_rounded(x, inside, values_ptr + row * inner + column, scale_ptr + row)


@elementwise.activate.implement("triton", device="cuda")
def activate(x: Tensor, activation: str, gated: bool = False) -> Tensor:
    rows, inner = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    kind = ACTIVATIONS.index(activation)
    out = x.new_empty(rows, inner)
    is_rounded = inner <= rounded.MOST_WIDTH and rounded.is_rounded(inner)
    float8_rows = rounded.unwritten(rows, inner, x) if is_rounded else (out, out)
    if rows:
        block = next_power_of_2(inner) if is_rounded else min(GATED_BLOCK, next_power_of_2(inner))
        grid = (rows, cdiv(inner, block))
        activate_kernel[grid](
            x,
            out,
            *float8_rows,
            inner,
            x.stride(0),
            kind,
            gated,
            is_rounded,
            block,
            is_dependent(x.device.index),
            num_warps=warps(block),
            **launched(x.device.index),
        )
    return rounded.with_rounded(out, float8_rows) if is_rounded else out


@elementwise.silu_mul.implement("triton", device="cuda")
def silu_mul(x: Tensor) -> Tensor:
    return activate(x, "silu", True)


@elementwise.gelu_mul.implement("triton", device="cuda")
def gelu_mul(x: Tensor) -> Tensor:
    return activate(x, "gelu_tanh", True)


@triton.jit
def position_kernel(x_ptr, position_ptr, out_ptr, growth, period, offset, width, BLOCK: tl.constexpr):
    """BLOCK elements of one token's heads times the factor of its position."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    whole = (tl.load(position_ptr + token) + offset) // period
    factor = growth * tl.log(1.0 + whole.to(tl.float32)) + 1.0
    x = tl.load(x_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out_ptr + token * width + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@elementwise.scale_by_position.implement("triton", device="cuda")
def scale_by_position(x: Tensor, positions: Tensor, growth: float, period: int, first: int = 0) -> Tensor:
    tokens, heads, dim = x.shape
    out = torch.empty_like(x)
    if tokens:
        block = min(GATED_BLOCK, next_power_of_2(heads * dim))
        position_kernel[(tokens, cdiv(heads * dim, block))](
            x, positions, out, growth, period, first, heads * dim, block, num_warps=warps(block), **EXACT
        )
    return out


@triton.jit
def row_factor_kernel(x_ptr, factor_ptr, out_ptr, width, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of one row times its factor; ONE: that of all."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(factor_ptr + (0 if ONE else row))
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@elementwise.scale_rows.implement("triton", device="cuda")
def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    rows, width = x.shape
    x, out = x.contiguous(), x.new_empty(rows, width)
    if rows:
        block = min(GATED_BLOCK, next_power_of_2(width))
        row_factor_kernel[(rows, cdiv(width, block))](
            x, factors, out, width, len(factors) == 1, block, num_warps=warps(block), **EXACT
        )
    return out


@triton.jit
def value_norm_kernel(
    x_ptr,
    out_ptr,
    eps,
    width,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """One row: the first program computes the norms of its heads, the others copy BLOCK elements."""
    SIZE: tl.constexpr = HEADS * DIM
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kept = width if COPIED else width - SIZE
    source, target = x_ptr + row * width, out_ptr + row * (kept + SIZE)
    if part == 0:
        head, column = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
        inside = (head < HEADS) & (column < DIM)
        x = tl.load(source + width - SIZE + head * DIM + column, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tree_sums(x * x) / DIM + eps)[:, None]
        tl.store(target + kept + head * DIM + column, x.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        copied = (part - 1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + copied, tl.load(source + copied, mask=copied < kept), mask=copied < kept)


@elementwise.norm_values.implement("triton", device="cuda")
def norm_values(x: Tensor, heads: int, dim: int, eps: float, copied: bool = False) -> Tensor:
    rows, width = x.shape
    size = heads * dim
    kept = width if copied else width - size
    x, out = x.contiguous(), x.new_empty(rows, kept + size)
    if rows:
        block, dim_block = min(GATED_BLOCK, next_power_of_2(max(kept, 1))), next_power_of_2(dim)
        heads_block = next_power_of_2(heads)
        value_norm_kernel[(rows, 1 + cdiv(kept, block))](
            x,
            out,
            eps,
            width,
            heads,
            dim,
            copied,
            block,
            heads_block,
            dim_block,
            num_warps=warps(heads_block * dim_block),
            **EXACT,
        )
    return out


@triton.jit
def gate_inputs_kernel(x_ptr, input_ptr, out_ptr, width, stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of one row: the activation of x times the inputs."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = active(tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32), KIND)
    x = x * tl.load(input_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@elementwise.gate_inputs.implement("triton", device="cuda")
def gate_inputs(x: Tensor, inputs: Tensor, layer: int, activation: str) -> Tensor:
    rows, width = x.shape
    x, out = x.contiguous(), x.new_empty(rows, width)
    if rows:
        block = min(GATED_BLOCK, next_power_of_2(width))
        gate_inputs_kernel[(rows, cdiv(width, block))](
            x,
            inputs[:, layer * width :],
            out,
            width,
            inputs.stride(0),
            ACTIVATIONS.index(activation),
            block,
            num_warps=warps(block),
            **EXACT,
        )
    return out
