"""Norms, rotary embedding and gated activations on the GPU: a program per row, with the reference's arithmetic.

A sum over a row is one tree whose shape depends on the row's width only, so a row's bits do not depend on other rows.
Nothing is contracted into a fused multiply-add except `tl.fma`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.ops import elementwise
from tokserve.ops.triton.launch import EXACT, warps

GATED_BLOCK = 1024  # outputs of one program


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """One row of WIDTH elements; ADD: the row is x + residual, which is written to total too."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        total = (x + residual).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + column, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / WIDTH
    tl.store(out_ptr + row + column, (x * tl.rsqrt(mean + eps) * weight).to(out_ptr.dtype.element_ty), mask=inside)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    x = x.contiguous()
    out = torch.empty_like(x)
    total = out if residual is None else torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        other = x if residual is None else residual.contiguous()
        rms_norm_kernel[(rows,)](
            x, other, weight, out, total, eps, width, block, residual is not None, num_warps=warps(block), **EXACT
        )  # fmt: skip
    return out, total


@elementwise.rms_norm.implement("triton", device="cuda")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, None, weight, eps)[0]


@elementwise.add_rms_norm.implement("triton", device="cuda")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, eps)


@triton.jit
def rotate(x, partner, cos, sin, first):
    """Element i < half (`first`) pairs with i + half: x cos - partner sin there, x cos + partner sin past it."""
    return tl.where(first, x * cos - partner * sin, x * cos + partner * sin)


@triton.jit
def rotated_heads(x_ptr, head, column, inside, cos, sin, head_stride, ROT: tl.constexpr):
    """Heads [H,1] x elements [1,D] at x_ptr after the rotation, in float32: [H,D]."""
    HALF: tl.constexpr = ROT // 2
    first = column < HALF
    rotated = column < ROT
    partner_column = tl.where(first, column + HALF, tl.where(rotated, column - HALF, column))
    x = tl.load(x_ptr + head * head_stride + column, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + head * head_stride + partner_column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(rotated, rotate(x, partner, cos, sin, first), x)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, table_ptr, position_ptr, q_out, k_out, q_stride, q_head_stride, k_stride, k_head_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
):  # fmt: skip
    """All query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM_BLOCK)[None, :]
    angle = column % (ROT // 2)
    row = table_ptr + tl.load(position_ptr + token) * ROT
    rotated = column < ROT
    cos = tl.load(row + angle, mask=rotated, other=1.0)
    sin = tl.load(row + ROT // 2 + angle, mask=rotated, other=0.0)
    head = tl.arange(0, Q_BLOCK)[:, None]
    inside = (head < Q_HEADS) & (column < DIM)
    q = rotated_heads(q_ptr + token * q_stride, head, column, inside, cos, sin, q_head_stride, ROT)
    tl.store(q_out + (token * Q_HEADS + head) * DIM + column, q.to(q_out.dtype.element_ty), mask=inside)
    head = tl.arange(0, K_BLOCK)[:, None]
    inside = (head < K_HEADS) & (column < DIM)
    k = rotated_heads(k_ptr + token * k_stride, head, column, inside, cos, sin, k_head_stride, ROT)
    tl.store(k_out + (token * K_HEADS + head) * DIM + column, k.to(k_out.dtype.element_ty), mask=inside)


@elementwise.rope.implement("triton", device="cuda")
def rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q and k may be slices of one tensor [T, ...]."""
    tokens, q_heads, dim = q.shape
    k_heads = k.shape[1]
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if tokens:
        rope_kernel[(tokens,)](
            q, k, table, positions, q_out, k_out, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            q_heads, k_heads, dim, table.shape[1],
            triton.next_power_of_2(q_heads), triton.next_power_of_2(k_heads), triton.next_power_of_2(dim),
            num_warps=warps(triton.next_power_of_2(q_heads * dim)), **EXACT,
        )  # fmt: skip
    return q_out, k_out


@triton.jit
def tanh(x):
    """Hyperbolic tangent from one exponential, exact at both ends."""
    scaled = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - scaled) / (1.0 + scaled)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def gate_kernel(x_ptr, out_ptr, inner, x_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK outputs of one row: act(x[:inner]) * x[inner:]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        cubic = (gate + gate * gate * gate * 0.044715) * 0.7978845608028654  # sqrt(2 / pi)
        active = gate * 0.5 * (1.0 + tanh(cubic))
    else:
        active = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * inner + column, (active * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated(x: Tensor, gelu: bool) -> Tensor:
    """act(first half) * second half of each row of x [T,2I]; SiLU, or GELU in its tanh approximation."""
    rows, inner = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, inner)
    if rows:
        block = min(GATED_BLOCK, triton.next_power_of_2(inner))
        grid = (rows, triton.cdiv(inner, block))
        gate_kernel[grid](x, out, inner, x.stride(0), gelu, block, num_warps=warps(block), **EXACT)
    return out


@elementwise.silu_mul.implement("triton", device="cuda")
def silu_mul(x: Tensor) -> Tensor:
    return gated(x, False)


@elementwise.gelu_mul.implement("triton", device="cuda")
def gelu_mul(x: Tensor) -> Tensor:
    return gated(x, True)
