"""Products of many rows whose inputs one warp fetches by TMA while others multiply (warp specialisation).  On trial.

A program computes a tile of one chain of the inputs; each of two groups of warps multiplies half of its rows.  The
matrix unit's operations on an output are those of `dense`, in the same order, so the bits are, too.  Chains of narrow
weights have programs of their own, and another kernel adds them in ascending order.  What lies past a matrix's edge is
read as zeros.

Programs describe the matrices to the TMA unit themselves: Triton cannot divide a tile that the host has described.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu import candidates
from tokserve.gpu.kernels.elementwise import ACTIVATIONS, active
from tokserve.gpu.kernels.launch import (
    cdiv,
    is_dependent,
    launch_dependents,
    launched,
    tuned,
    wait_for_inputs,
)
from tokserve.gpu.kernels.products.tiles import BAND, add_step, store_product, tile_of, tile_start
from tokserve.gpu.kernels.rows.chains import add_chains

STEP = 64  # inputs fetched at once, of a gate and what it gates
CANDIDATES = {torch.bfloat16: "linear_tma", torch.float16: "linear_tma", torch.float8_e4m3fn: "float8_tma"}
WARPS = 4  # of each group
LEAST_ROWS = 65  # with fewer, all rows are in one tile of `dense`
MOST_PART_ROWS = 1024  # of a weight with several chains, whose sums take memory
ALIGNMENT = 16  # bytes, of rows that TMA reads


@triton.jit
def describe(x_ptr, rows, columns, stride, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """A matrix [rows,columns] of which blocks are fetched."""
    return tl.make_tensor_descriptor(x_ptr, [rows, columns], [stride, 1], [BLOCK_ROWS, BLOCK_COLUMNS])


@triton.jit(do_not_specialize=["rows"])
def linear_tma_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    rows,
    outputs,
    inputs,
    x_stride,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of x W^T + bias, with scales as in `dense.linear_kernel`; with CHAINS > 1, and then without bias, of the
    sums of one part of the inputs [CHAINS,rows,outputs]."""
    x_blocks = describe(x_ptr, rows, inputs, x_stride, BLOCK_M, BLOCK_K)
    weight_blocks = describe(weight_ptr, outputs, inputs, inputs, BLOCK_N, BLOCK_K)
    wait_for_inputs(DEPENDENT)
    first_row, first_output = tile_start(rows, outputs, BAND, BLOCK_M, BLOCK_N)
    row, output = tile_of(rows, outputs, BAND, BLOCK_M, BLOCK_N)
    length = inputs // CHAINS
    first = tl.program_id(1) * length if CHAINS > 1 else 0
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(first, first + length, BLOCK_K, warp_specialize=True):
        x = x_blocks.load([first_row, start])
        weight = weight_blocks.load([first_output, start])
        sums = add_step(sums, x, weight, weight_scale_ptr, start, output, outputs, outputs, SCALED, GROUP, BLOCK_K)
    launch_dependents(DEPENDENT)
    if CHAINS > 1:
        out_ptr += tl.program_id(1) * rows.to(tl.int64) * outputs
    offset = row.to(tl.int64)[:, None] * outputs + output[None, :]
    valid = (row < rows)[:, None] & (output < outputs)[None, :]
    store_product(
        sums,
        out_ptr,
        bias_ptr,
        x_scale_ptr,
        weight_scale_ptr,
        row,
        output,
        offset,
        valid,
        rows,
        outputs,
        SCALED,
        GROUP,
        BIAS,
    )


@triton.jit(do_not_specialize=["rows"])
def gated_tma_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    inner,
    inputs,
    x_stride,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of the output [rows,inner] of the weight [2 * inner, inputs].  KIND: the number of the activation."""
    x_blocks = describe(x_ptr, rows, inputs, x_stride, BLOCK_M, BLOCK_K)
    weight_blocks = describe(weight_ptr, 2 * inner, inputs, inputs, BLOCK_N, BLOCK_K)
    wait_for_inputs(DEPENDENT)
    first_row, first_output = tile_start(rows, inner, BAND, BLOCK_M, BLOCK_N)
    gate, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, warp_specialize=True):
        x = x_blocks.load([first_row, start])
        of_gate = weight_blocks.load([first_output, start])
        of_up = weight_blocks.load([inner + first_output, start])
        gate = tl.dot(x, of_gate.T, gate, input_precision="ieee")
        up = tl.dot(x, of_up.T, up, input_precision="ieee")
    launch_dependents(DEPENDENT)
    row, output = tile_of(rows, inner, BAND, BLOCK_M, BLOCK_N)
    if BIAS:
        gate += tl.load(bias_ptr + output, mask=output < inner, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + inner + output, mask=output < inner, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    out = active(gate.to(dtype).to(tl.float32), KIND) * up.to(dtype).to(tl.float32)
    offset = row.to(tl.int64)[:, None] * inner + output[None, :]
    tl.store(out_ptr + offset, out.to(dtype), mask=(row < rows)[:, None] & (output < inner)[None, :])


def fits(x: Tensor, weight: Tensor, chains: int = 1) -> bool:
    """Whether x [T,K] times the weight's [N,K] transpose, summed in so many chains, is computed here."""
    candidate = CANDIDATES.get(x.dtype)
    if candidate is None or not candidates.is_on(candidate) or len(x) < LEAST_ROWS:
        return False
    return (
        has_tma(x.device.index)
        and (chains == 1 or len(x) <= MOST_PART_ROWS)
        and not any(
            (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % ALIGNMENT for tensor in (x, weight)
        )
    )


def has_tma(device: int | None) -> bool:
    """Whether GPU number `device` runs these kernels, as the table says; the interpreter does."""
    return triton.knobs.runtime.interpret or bool(tuned("launch", device).get("tma", False))


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    chains: int,
    step: int,
    scales: tuple[Tensor, Tensor] | None,
    group: int,
) -> Tensor:
    """`dense.product` of what `fits`, in so many chains, and with so many inputs fetched at once."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    device = x.device.index
    config = tuned("linear_tma", device, rows=rows, chains=chains, bytes=x.element_size())
    block_m, block_n = config["tile"]
    parts = out if chains == 1 else x.new_empty((chains, rows, outputs), dtype=torch.float32)
    triton.set_allocator(allocate)
    linear_tma_kernel[(cdiv(rows, block_m) * cdiv(outputs, block_n), chains)](
        x,
        weight,
        out if bias is None else bias,
        parts,
        *(scales or (out, out)),
        rows,
        outputs,
        inputs,
        x.stride(0),
        scales is not None,
        group,
        bias is not None and chains == 1,
        BAND,
        block_m,
        block_n,
        step,
        chains,
        is_dependent(device),
        num_warps=WARPS,
        num_stages=config["stages"],
        **launched(device),
    )
    if chains > 1:
        add_chains(parts, bias, out)
    return out


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, activation: str) -> Tensor:
    """out [T,I] from x [T,K] and the weight [2I,K], which has one chain; what `fits`."""
    (rows, inputs), inner = x.shape, out.shape[1]
    device = x.device.index
    config = tuned("gated_tma", device, rows=rows)
    block_m, block_n = config["tile"]
    triton.set_allocator(allocate)
    gated_tma_kernel[(cdiv(rows, block_m) * cdiv(inner, block_n),)](
        x,
        weight,
        out if bias is None else bias,
        out,
        rows,
        inner,
        inputs,
        x.stride(0),
        bias is not None,
        ACTIVATIONS.index(activation),
        BAND,
        block_m,
        block_n,
        STEP,
        is_dependent(device),
        num_warps=WARPS,
        num_stages=config["stages"],
        **launched(device),
    )
    return out


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the programs' descriptions, which only the kernel that is launched next reads."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
