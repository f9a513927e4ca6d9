"""The product of experts' gates and what they gate in one kernel: activation(x Wg^T + bg) * (x Wu^T + bu).  On trial.

Rows are sorted by expert.  Each sum is the chain of `mixture.experts_kernel`, and is rounded as its output is before
the activation: the bits are those of the product and the gate by themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokserve.gpu.kernels.elementwise import active
from tokserve.gpu.kernels.launch import launch_dependents, wait_for_inputs
from tokserve.gpu.kernels.products.tiles import add_step, rows_of_tile


@triton.jit
def gated_experts_kernel(
    x_ptr,
    weights_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    starts_ptr,
    tiles_ptr,
    x_scale_ptr,
    weight_scales_ptr,
    inner,
    inputs,
    x_stride,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of the sorted rows of one expert, row r being token order[r] // K of x, times its [2 * inner, inputs].
    KIND: the number of the activation; GROUP: of `add_step`; the rest is as in `mixture.experts_kernel`."""
    wait_for_inputs(DEPENDENT)
    INTEGERS: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    SCALED: tl.constexpr = x_ptr.dtype.element_ty == tl.int8 or x_ptr.dtype.element_ty == tl.float8e4nv
    expert, start, end = rows_of_tile(starts_ptr, tiles_ptr, EXPERTS, E_BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    row = start + tl.arange(0, BLOCK_M)
    output, step = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_valid, weight_valid = (row < end)[:, None], (output < inner)[:, None]
    source = tl.load(order_ptr + row, mask=row < end, other=0) // K
    weight_ptr = tl.multiple_of(tl.load(weights_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_stride + step[None, :]
    gate_ptrs = weight_ptr + output.to(tl.int64)[:, None] * inputs + step[None, :]
    up_ptrs = gate_ptrs + inner.to(tl.int64) * inputs
    scales_ptr = weight_scales_ptr
    if SCALED:
        scales_ptr = tl.load(weight_scales_ptr + expert).to(tl.pointer_type(tl.float32))
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGERS else tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGERS else tl.float32)
    for at in range(0, inputs, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs + at, mask=x_valid, other=0.0)
            of_gate = tl.load(gate_ptrs + at, mask=weight_valid, other=0.0)
            of_up = tl.load(up_ptrs + at, mask=weight_valid, other=0.0)
        else:
            remaining = (step < inputs - at)[None, :]
            x = tl.load(x_ptrs + at, mask=x_valid & remaining, other=0.0)
            of_gate = tl.load(gate_ptrs + at, mask=weight_valid & remaining, other=0.0)
            of_up = tl.load(up_ptrs + at, mask=weight_valid & remaining, other=0.0)
        gate = add_step(gate, x, of_gate, scales_ptr, at, output, inner, 2 * inner, SCALED, GROUP, BLOCK_K)
        up = add_step(up, x, of_up, scales_ptr, at, inner + output, 2 * inner, 2 * inner, SCALED, GROUP, BLOCK_K)
    launch_dependents(DEPENDENT)
    if SCALED:
        of_rows = tl.load(x_scale_ptr + source, mask=row < end, other=0.0)[:, None]
        gate = gate.to(tl.float32) * of_rows
        up = up.to(tl.float32) * of_rows
        if GROUP == 0:
            gate = gate * tl.load(scales_ptr + output, mask=output < inner, other=0.0)[None, :]
            up = up * tl.load(scales_ptr + inner + output, mask=output < inner, other=0.0)[None, :]
    if BIAS:
        bias_ptr += expert * 2 * inner
        gate += tl.load(bias_ptr + output, mask=output < inner, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + inner + output, mask=output < inner, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    out = active(gate.to(dtype).to(tl.float32), KIND) * up.to(dtype).to(tl.float32)
    offset = row.to(tl.int64)[:, None] * inner + output[None, :]
    tl.store(out_ptr + offset, out.to(dtype), mask=(row < end)[:, None] & (output < inner)[None, :])
