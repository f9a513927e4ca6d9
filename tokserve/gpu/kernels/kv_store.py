"""Keys and values into the paged cache on the GPU: alone, or with the norms and rotations of their projection.

A program per token; the arithmetic is that of the norm and the rotation by themselves, roundings included.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.elementwise import pairing, rotate
from tokserve.gpu.kernels.launch import (
    EXACT,
    is_dependent,
    launch_dependents,
    launched,
    next_power_of_2,
    wait_for_inputs,
    warps,
)
from tokserve.gpu.kernels.rows.chains import load_product, sums_of
from tokserve.gpu.kernels.rows.rounded import nearest
from tokserve.gpu.kernels.sums import tree_sum, tree_sums
from tokserve.ops import attention


@triton.jit
def to_cache(x, cache, scale):
    """x in the cache's dtype; scaled if that is float8."""
    if cache.dtype.element_ty == tl.float8e4nv:
        return nearest(tl.div_rn(x.to(tl.float32), scale))
    else:
        return x.to(cache.dtype.element_ty)


@triton.jit
def store_kernel(
    k_ptr,
    v_ptr,
    k_cache,
    v_cache,
    slot_ptr,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Keys and values of one token into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, DIM_BLOCK)[None, :]
    inside = (head < HEADS) & (column < DIM)
    offset = ((slot // PAGE * HEADS + head) * PAGE + slot % PAGE) * DIM + column
    k = tl.load(k_ptr + token * k_stride + head * k_head_stride + column, mask=inside)
    v = tl.load(v_ptr + token * v_stride + head * v_head_stride + column, mask=inside)
    tl.store(k_cache + offset, to_cache(k, k_cache, k_scale), mask=inside)
    tl.store(v_cache + offset, to_cache(v, v_cache, v_scale), mask=inside)


@attention.store_kv.implement("triton", device="cuda")
def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """k and v may be slices of one tensor [T, ...]."""
    tokens, heads, dim = k.shape
    if tokens:
        heads_block, dim_block = next_power_of_2(heads), next_power_of_2(dim)
        store_kernel[(tokens,)](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            k_scale,
            v_scale,
            heads,
            dim,
            k_cache.shape[2],
            heads_block,
            dim_block,
            num_warps=warps(heads_block * dim_block),
            **EXACT,
        )


@triton.jit
def rows_kernel(rows, pages, slot_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row = tl.load(rows + token * WIDTH + column, mask=column < WIDTH)
    tl.store(pages + tl.load(slot_ptr + token) * WIDTH + column, row, mask=column < WIDTH)


@attention.store_rows.implement("triton", device="cuda")
def store_rows(rows: Tensor, pages: Tensor, slot_mapping: Tensor) -> None:
    tokens, width = rows.shape
    if tokens:
        block = next_power_of_2(width)
        rows_kernel[(tokens,)](rows, pages, slot_mapping, width, block, num_warps=warps(block), **EXACT)


@triton.jit
def prepared_heads(
    x_ptr,
    bias_ptr,
    row,
    start,
    size,
    weight_ptr,
    eps,
    head,
    column,
    inside,
    cos,
    sin,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    NORM: tl.constexpr,
    COUNT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STRIDE: tl.constexpr,
    CHAINS: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """COUNT heads [H,1] x elements [1,D], heads STRIDE apart from `start` on in a row as `load_product` loads it,
    normed, rounded to DTYPE, rotated: [H,D] float32.

    NORM: 0 none, 1 of each head, 2 of all heads together, 3 of each head after the rotation.
    """
    first, partner_column, _ = pairing(column, ROT, INTERLEAVED)
    first_of_head = start + head * STRIDE
    x = load_product(x_ptr, bias_ptr, row, first_of_head + column, inside, size, CHAINS, BIAS, DTYPE)
    partner = load_product(x_ptr, bias_ptr, row, first_of_head + partner_column, inside, size, CHAINS, BIAS, DTYPE)
    if (NORM == 1) | (NORM == 2):
        square = tree_sums(x * x)
        if NORM == 2:
            root = tl.rsqrt(tree_sum(square) / (COUNT * DIM) + eps)
            weight_row = weight_ptr + head * DIM
        else:
            root = tl.rsqrt(square / DIM + eps)[:, None]
            weight_row = weight_ptr + head * 0
        weight = tl.load(weight_row + column, mask=inside, other=0.0).to(tl.float32)
        partner_weight = tl.load(weight_row + partner_column, mask=inside, other=0.0).to(tl.float32)
        x = (x * root * weight).to(DTYPE).to(tl.float32)
        partner = (partner * root * partner_weight).to(DTYPE).to(tl.float32)
    x = tl.where(column < ROT, rotate(x, partner, cos, sin, first), x)
    if NORM == 3:
        x = x.to(DTYPE).to(tl.float32)
        root = tl.rsqrt(tree_sums(x * x) / DIM + eps)[:, None]
        x = x * root * tl.load(weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["tokens"])
def norm_rope_store_kernel(
    qkv_ptr,
    bias_ptr,
    q_weight,
    k_weight,
    eps,
    table_ptr,
    position_ptr,
    k_cache,
    v_cache,
    slot_ptr,
    q_out,
    tokens,
    qkv_stride,
    k_scale,
    v_scale,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    CHAINS: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token: its queries out, its keys and values into their slot.  CHAINS and BIAS: as `load_product` takes
    them."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    qkv, size = token * qkv_stride, tokens.to(tl.int64) * qkv_stride
    dtype: tl.constexpr = q_out.dtype.element_ty
    column = tl.arange(0, DIM_BLOCK)[None, :]
    _, _, angle = pairing(column, ROT, INTERLEAVED)
    row = table_ptr + tl.load(position_ptr + token) * ROT
    cos = tl.load(row + angle, mask=column < ROT, other=1.0)
    sin = tl.load(row + ROT // 2 + angle, mask=column < ROT, other=0.0)
    head = tl.arange(0, Q_BLOCK)[:, None]
    inside = (head < Q_HEADS) & (column < DIM)
    q = prepared_heads(
        qkv_ptr,
        bias_ptr,
        qkv,
        0,
        size,
        q_weight,
        eps,
        head,
        column,
        inside,
        cos,
        sin,
        DIM,
        ROT,
        NORM,
        Q_HEADS,
        INTERLEAVED,
        Q_STRIDE,
        CHAINS,
        BIAS,
        dtype,
    )
    tl.store(q_out + (token * Q_HEADS + head) * DIM + column, q.to(dtype), mask=inside)
    slot = tl.load(slot_ptr + token)
    head = tl.arange(0, K_BLOCK)[:, None]
    inside = (head < K_HEADS) & (column < DIM)
    k = prepared_heads(
        qkv_ptr,
        bias_ptr,
        qkv,
        Q_HEADS * Q_STRIDE,
        size,
        k_weight,
        eps,
        head,
        column,
        inside,
        cos,
        sin,
        DIM,
        ROT,
        NORM,
        K_HEADS,
        INTERLEAVED,
        DIM,
        CHAINS,
        BIAS,
        dtype,
    )
    within = Q_HEADS * Q_STRIDE + (K_HEADS + head) * DIM + column
    v = load_product(qkv_ptr, bias_ptr, qkv, within, inside, size, CHAINS, BIAS, dtype).to(dtype)
    offset = ((slot // PAGE * K_HEADS + head) * PAGE + slot % PAGE) * DIM + column
    launch_dependents(DEPENDENT)
    # rounded to the dtype of the projection first, as a key that is stored by itself
    tl.store(k_cache + offset, to_cache(k.to(dtype), k_cache, k_scale), mask=inside)
    tl.store(v_cache + offset, to_cache(v, v_cache, v_scale), mask=inside)


@attention.norm_rope_store.implement("triton", device="cuda")
def norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    interleaved: bool = False,
    norm_last: bool = False,
    gated: bool = False,
) -> Tensor:
    """The reference, but for the order of the norm's sum."""
    tokens, (kv_heads, page, dim) = qkv.shape[0], k_cache.shape[1:]
    heads = (qkv.shape[1] // dim - 2 * kv_heads) // (2 if gated else 1)
    q = qkv.new_empty(tokens, heads, dim)
    norm = 0 if q_weight is None else 2 if len(q_weight) != dim else 1
    if norm_last and norm == 2:
        raise ValueError("norm_rope_store: a norm after the rotation is of each head")
    if tokens:
        sums, bias, chains = sums_of(qkv)
        q_block, dim_block = next_power_of_2(heads), next_power_of_2(dim)
        norm_rope_store_kernel[(tokens,)](
            sums,
            q if bias is None else bias,
            q if q_weight is None else q_weight,
            q if k_weight is None else k_weight,
            eps,
            table,
            positions,
            k_cache,
            v_cache,
            slot_mapping,
            q,
            tokens,
            qkv.stride(0),
            k_scale,
            v_scale,
            heads,
            kv_heads,
            dim,
            table.shape[1],
            page,
            3 if norm and norm_last else norm,
            interleaved,
            q_block,
            next_power_of_2(kv_heads),
            dim_block,
            2 * dim if gated else dim,
            chains,
            bias is not None,
            is_dependent(qkv.device.index),
            num_warps=warps(q_block * dim_block),
            **launched(qkv.device.index),
        )
    return q
