"""Products of up to 16 rows that fetch weights before their inputs are there, in Gluon.  On trial.

A kernel that begins while the one before it ends may read nothing that this one writes; but weights are older.  A
program fetches the first of its weights by TMA into shared memory, then waits, and then fetches its inputs: when these
come, most of its part of the weight is there.  Sums are those of `dense` and of `gated`, in tiles of 16 rows: steps of
16 inputs by mma.sync, in ascending order, in as many chains.  Programs leave room for those of the next kernel.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokserve.gpu import candidates
from tokserve.gpu.kernels.elementwise import ACTIVATIONS, active
from tokserve.gpu.kernels.launch import (
    cdiv,
    counters,
    is_dependent,
    is_last_of,
    launch_dependents,
    launched,
    wait_for_inputs,
)
from tokserve.gpu.kernels.products.by_tma import ALIGNMENT, has_tma
from tokserve.gpu.kernels.prompts.by_groups import DTYPES, fetch

ROWS = 16  # of a tile
OUTPUTS = 32  # of a program
STEP = 128  # inputs fetched at once
STAGES, GATED_STAGES = 8, 5  # of such steps in shared memory, so that two programs have room
WARPS = 4
MOST_OUTPUTS = 1 << 16  # of a weight: an output head takes long enough to do without


@gluon.jit
def fetch_weights(blocks, first_output, outputs, at, parts, ready, stage, GATED: gl.constexpr):
    """Begin to fetch weights of a step's inputs, from number `at` on, to place `stage`; GATED: of both halves."""
    FACTOR: gl.constexpr = 2 if GATED else 1
    mbarrier.expect(ready.index(stage), blocks.block_type.nbytes * FACTOR)
    fetch(blocks, [first_output, at], ready.index(stage), parts.index(stage * FACTOR))
    if GATED:
        fetch(blocks, [outputs + first_output, at], ready.index(stage), parts.index(stage * FACTOR + 1))


@gluon.jit(do_not_specialize=["rows"])
def linear_early_kernel(
    x_blocks,
    weight_blocks,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    rows,
    outputs,
    inputs,
    BIAS: gl.constexpr,
    CHAINS: gl.constexpr,
    ADDS: gl.constexpr,
    GATED: gl.constexpr,
    KIND: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """A tile of x W^T + bias, with CHAINS > 1 of one chain, which goes to part_ptr [CHAINS,rows,outputs] and, if ADDS,
    is added to the others by the last of its tile; GATED: of the activation KIND of that, times as many outputs from
    the weight's other half."""
    FACTOR: gl.constexpr = 2 if GATED else 1
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    x_parts = gl.allocate_shared_memory(x_blocks.dtype, [STAGES, BLOCK_M, STEP], x_blocks.layout)
    weight_parts = gl.allocate_shared_memory(
        weight_blocks.dtype, [STAGES * FACTOR, BLOCK_N, STEP], weight_blocks.layout
    )
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    weight_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(stage), count=1)
        mbarrier.init(weight_ready.index(stage), count=1)
    fence_async_shared()
    first_output = gl.program_id(0) * BLOCK_N
    length = inputs // CHAINS
    first = gl.program_id(1) * length
    steps = length // STEP
    for stage in gl.static_range(STAGES):
        if stage < steps:
            fetch_weights(
                weight_blocks, first_output, outputs, first + stage * STEP, weight_parts, weight_ready, stage, GATED
            )
    wait_for_inputs(DEPENDENT)
    for stage in gl.static_range(STAGES):
        if stage < steps:
            mbarrier.expect(x_ready.index(stage), x_blocks.block_type.nbytes)
            fetch(x_blocks, [0, first + stage * STEP], x_ready.index(stage), x_parts.index(stage))
    sums, up = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA), gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
    for step in range(steps):
        place = step % STAGES
        filled = (step // STAGES) & 1
        mbarrier.wait(weight_ready.index(place), filled)
        mbarrier.wait(x_ready.index(place), filled)
        x = x_parts.index(place).load(gl.DotOperandLayout(0, MMA, 2))
        weight = weight_parts.index(place * FACTOR).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
        sums = mma_v2(x, weight, sums)
        if GATED:
            other = weight_parts.index(place * FACTOR + 1).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
            up = mma_v2(x, other, up)
        if step + STAGES < steps:
            at = first + (step + STAGES) * STEP
            fetch_weights(weight_blocks, first_output, outputs, at, weight_parts, weight_ready, place, GATED)
            mbarrier.expect(x_ready.index(place), x_blocks.block_type.nbytes)
            fetch(x_blocks, [0, at], x_ready.index(place), x_parts.index(place))
    launch_dependents(DEPENDENT)
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA))
    output = first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(0, MMA))
    offset = gl.expand_dims(row.to(gl.int64) * outputs, 1) + gl.expand_dims(output, 0)
    valid = gl.expand_dims(row < rows, 1) & gl.expand_dims(output < outputs, 0)
    is_last = True
    if CHAINS > 1:
        size = rows.to(gl.int64) * outputs
        gl.store(part_ptr + gl.program_id(1) * size + offset, sums, mask=valid)
        is_last = is_last_of(count_ptr + gl.program_id(0), 1, CHAINS) if ADDS else False
    if is_last:
        if CHAINS > 1:
            sums = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
            for chain in gl.static_range(CHAINS):
                sums += gl.load(part_ptr + chain * size + offset, mask=valid, other=0.0, cache_modifier=".cg")
        if BIAS:
            bias = gl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(gl.float32)
            sums += gl.expand_dims(bias, 0)
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        if GATED:
            if BIAS:
                bias = gl.load(bias_ptr + outputs + output, mask=output < outputs, other=0.0).to(gl.float32)
                up += gl.expand_dims(bias, 0)
            sums = active(sums.to(dtype).to(gl.float32), KIND) * up.to(dtype).to(gl.float32)
        gl.store(out_ptr + offset, sums.to(dtype), mask=valid)


def fits(x: Tensor, weight: Tensor, chains: int = 1) -> bool:
    """Whether x [T,K] times the weight's [N,K] transpose, summed in so many chains, is computed here."""
    return (
        candidates.is_on("products_early")
        and not triton.knobs.runtime.interpret
        and 0 < len(x) <= ROWS
        and x.dtype in DTYPES
        and x.dtype == weight.dtype
        and has_tma(x.device.index)
        and x.shape[1] % (chains * STEP) == 0
        and len(weight) % (2 * OUTPUTS) == 0
        and len(weight) <= MOST_OUTPUTS
        and not any(
            (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % ALIGNMENT for tensor in (x, weight)
        )
    )


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    chains: int = 1,
    activation: str | None = None,
    left: Tensor | None = None,
) -> Tensor:
    """`dense.product` of what `fits`, in so many chains; with an activation `gated.gated_product`, in one."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    layouts = [gl.NVMMASharedLayout.get_default_for([size, STEP], DTYPES[x.dtype]) for size in (ROWS, OUTPUTS)]
    x_blocks = TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [ROWS, STEP], layouts[0])
    weight_blocks = TensorDescriptor(weight, list(weight.shape), [inputs, 1], [OUTPUTS, STEP], layouts[1])
    device = x.device.index
    parts = left
    if parts is None:
        parts = out if chains == 1 else x.new_empty((chains, rows, outputs), dtype=torch.float32)
    linear_early_kernel[(cdiv(outputs, OUTPUTS), chains)](
        x_blocks,
        weight_blocks,
        out if bias is None else bias,
        out,
        parts,
        out if chains == 1 else counters(x.device),
        rows,
        outputs,
        inputs,
        bias is not None,
        chains,
        left is None,
        activation is not None,
        0 if activation is None else ACTIVATIONS.index(activation),
        ROWS,
        OUTPUTS,
        STEP,
        STAGES if activation is None else GATED_STAGES,
        is_dependent(device),
        num_warps=WARPS,
        **launched(device),
    )
    return out
