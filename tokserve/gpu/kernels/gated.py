"""The product of a gate and what it gates in one kernel: activation(x Wg^T + bg) * (x Wu^T + bu).

A program computes a tile of the gate and the same tile of what is gated, from the same rows, and leaves only what comes
of both.  Each sum is the chain of `linear_kernel`, and is rounded as its output is before the activation: the bits are
those of the product and the gate by themselves, without a launch and a pass through memory between them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels import elementwise, int8
from tokserve.gpu.kernels.dense import (
    BLOCK_K,
    PREFETCHED,
    chains,
    float8_step,
    is_library_used,
    plain_linear,
)
from tokserve.gpu.kernels.elementwise import ACTIVATIONS, active
from tokserve.gpu.kernels.launch import (
    cdiv,
    is_dependent,
    launch_dependents,
    launched,
    prefetch,
    tuned,
    wait_for_inputs,
)
from tokserve.gpu.kernels.products import by_tma, early
from tokserve.gpu.kernels.products.tiles import BAND, add_step, tile_of
from tokserve.ops import dense, quant
from tokserve.ops.dense import PackedWeight
from tokserve.ops.quant import PackedInt8


@triton.jit(do_not_specialize=["rows"])
def gated_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    rows,
    inner,
    inputs,
    half,
    x_stride,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of the output [rows,inner]; the weight is [2 * inner, inputs], `half` elements of each.  KIND: the number
    of the activation; the rest is as in `linear_kernel`."""
    row, output = tile_of(rows, inner, BAND, BLOCK_M, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    if DEPENDENT:
        line = tl.minimum(tl.arange(0, PREFETCHED) * 64, inputs - 1)
        first = weight_ptr + tl.minimum(output, inner - 1).to(tl.int64)[:, None] * inputs + line[None, :]
        prefetch(first)
        prefetch(first + half)
        wait_for_inputs(DEPENDENT)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    gate_ptrs = weight_ptr + output.to(tl.int64)[:, None] * inputs + step[None, :]
    up_ptrs = gate_ptrs + half
    x_valid, weight_valid = (row < rows)[:, None], (output < inner)[:, None]
    INTEGERS: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGERS else tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGERS else tl.float32)
    for start in range(0, inputs, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs + start, mask=x_valid, other=0.0)
            of_gate = tl.load(gate_ptrs + start, mask=weight_valid, other=0.0)
            of_up = tl.load(up_ptrs + start, mask=weight_valid, other=0.0)
        else:
            remaining = (step < inputs - start)[None, :]
            x = tl.load(x_ptrs + start, mask=x_valid & remaining, other=0.0)
            of_gate = tl.load(gate_ptrs + start, mask=weight_valid & remaining, other=0.0)
            of_up = tl.load(up_ptrs + start, mask=weight_valid & remaining, other=0.0)
        gate = add_step(gate, x, of_gate, weight_scale_ptr, start, output, inner, inner, SCALED, 0, BLOCK_K)
        up = add_step(up, x, of_up, weight_scale_ptr, start, output, inner, inner, SCALED, 0, BLOCK_K)
    launch_dependents(DEPENDENT)
    gate = finished(gate, bias_ptr, x_scale_ptr, weight_scale_ptr, row, output, rows, inner, 0, SCALED, BIAS)
    up = finished(up, bias_ptr, x_scale_ptr, weight_scale_ptr, row, output, rows, inner, inner, SCALED, BIAS)
    dtype = out_ptr.dtype.element_ty
    out = active(gate.to(dtype).to(tl.float32), KIND) * up.to(dtype).to(tl.float32)
    offset = row.to(tl.int64)[:, None] * inner + output[None, :]
    tl.store(out_ptr + offset, out.to(dtype), mask=(row < rows)[:, None] & (output < inner)[None, :])


@triton.jit
def finished(
    sums,
    bias_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    row,
    output,
    rows,
    inner,
    first,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Sums times their scales, plus the bias, whose numbers begin at `first`."""
    if SCALED:
        sums = sums.to(tl.float32) * tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
        sums = sums * tl.load(weight_scale_ptr + first + output, mask=output < inner, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + first + output, mask=output < inner, other=0.0).to(tl.float32)[None, :]
    return sums


def gated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: str, scales: tuple[Tensor, Tensor] | None
) -> Tensor:
    """out [T,I] from x [T,K] and the weight [2I,K], which has one chain; `scales` as those of `dense.product`."""
    (rows, inputs), inner = x.shape, out.shape[1]
    if scales is None and early.fits(x, weight):
        return early.product(x, weight, bias, out, 1, activation)
    if scales is None and by_tma.fits(x, weight):
        return by_tma.gated_product(x, weight, bias, out, activation)
    if rows:
        device = x.device.index
        config = tuned("linear", device, rows=rows, outputs=2 * inner, bytes=x.element_size())
        block_m, block_n = config["tile"][0], max(16, config["tile"][1] // 2)
        block_k = config.get("step", BLOCK_K) if scales is None else float8_step(0)
        gated_linear_kernel[(cdiv(rows, block_m) * cdiv(inner, block_n),)](
            x,
            weight,
            out if bias is None else bias,
            out,
            *(scales or (out, out)),
            rows,
            inner,
            inputs,
            inner * inputs,
            x.stride(0),
            scales is not None,
            bias is not None,
            inputs % block_k == 0,
            ACTIVATIONS.index(activation),
            BAND,
            block_m,
            block_n,
            block_k,
            is_dependent(device),
            num_warps=config["warps"],
            num_stages=config["stages"],
            **launched(device),
        )
    return out


@dense.gated_linear.implement("triton", device="cuda")
def gated_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """Two kernels where a library serves, or where the weight has several chains."""
    if activation is None or chains(packed.rows, packed.columns) > 1 or is_library_used(len(x), packed):
        both = plain_linear(x, packed, bias)
        return both if activation is None else elementwise.activate(both, activation, True)
    out = x.new_empty(len(x), packed.rows // 2)
    return gated_product(x, packed.packed, bias, out, activation, None)


@quant.gated_linear_int8.implement("triton", device="cuda")
def gated_linear_int8(x: Tensor, packed: PackedInt8, bias: Tensor | None, activation: str | None) -> Tensor:
    """After the rounding of rows."""
    if activation is None:
        return int8.linear(x, packed, bias)
    values, scales = int8.quantize(x)
    out = x.new_empty((len(x), packed.rows // 2), dtype=x.dtype)
    return gated_product(values, packed.packed, bias, out, activation, (scales, packed.scales))
