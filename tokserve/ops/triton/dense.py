"""Matrix products on the GPU: a batch-invariant one for exact serving, cuBLAS for fast serving.

The batch-invariant product accumulates each output over K in ascending order in one chain of the matrix unit, never
split over programs; tiles over M and N, and the size of a step of K, are chosen by M and N, which changes no output's
chain.  cuBLAS picks its order of summation by the shape of the call, so a row's bits depend on the size of
the batch.  Weights keep the checkpoint's layout, so an embedding tied to the head shares its memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tokserve.ops import dense
from tokserve.ops.dense import PackedWeight
from tokserve.ops.float8 import STEP
from tokserve.ops.triton import elementwise
from tokserve.ops.triton.launch import EXACT, torch_device, tuned

BLOCK_K = STEP  # inputs of one step; part of the arithmetic where both are float8, else what the table says
BAND = 8  # tiles of rows computed before the next outputs: their inputs stay in the L2 cache


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, x_scale_ptr, weight_scale_ptr, rows, outputs, inputs, x_stride,
    SCALED: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, BAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of x W^T + bias; EVEN: BLOCK_K divides the inputs; SCALED: both are float8, with a scale a row.

    GROUP > 0: the weight's scales are [inputs / GROUP, outputs]; BLOCK_K divides it.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * tiles_n)
    row = (band * BAND + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    weight_ptrs = weight_ptr + output.to(tl.int64)[:, None] * inputs + step[None, :]
    x_valid, weight_valid = (row < rows)[:, None], (output < outputs)[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs + start, mask=x_valid, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=weight_valid, other=0.0)
        else:
            remaining = (step < inputs - start)[None, :]
            x = tl.load(x_ptrs + start, mask=x_valid & remaining, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=weight_valid & remaining, other=0.0)
        if GROUP > 0:
            scale_ptrs = weight_scale_ptr + start // GROUP * outputs + output
            scale = tl.load(scale_ptrs, mask=output < outputs, other=0.0)
            sums += tl.dot(x, tl.trans(weight)) * scale[None, :]
        elif SCALED:
            sums = tl.dot(x, tl.trans(weight), sums, max_num_imprecise_acc=BLOCK_K)
        else:
            sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    if SCALED:
        sums = sums * tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
        if GROUP == 0:
            sums = sums * tl.load(weight_scale_ptr + output, mask=output < outputs, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    offset = row.to(tl.int64)[:, None] * outputs + output[None, :]
    valid = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(out_ptr + offset, sums.to(out_ptr.dtype.element_ty), mask=valid)


@dense.pack_linear.implement("cublas", device="cuda")
@dense.pack_linear.implement("triton", device="cuda")
@dense.pack_gated.implement("cublas", device="cuda")
@dense.pack_gated.implement("triton", device="cuda")
def pack(weight: Tensor) -> PackedWeight:
    """A copy of the weight on the GPU."""
    rows, columns = weight.shape
    copy = weight.to(torch_device(), copy=True, memory_format=torch.contiguous_format)
    return PackedWeight(rows, columns, weight.dtype, copy)


@dense.embedding.implement("cublas", device="cuda")
@dense.embedding.implement("triton", device="cuda")
def embedding(ids: Tensor, packed: PackedWeight, multiplier: float = 1.0) -> Tensor:
    rows = functional.embedding(ids, packed.packed)
    return rows if multiplier == 1.0 else rows.mul_(multiplier)


@dense.linear.implement("triton", device="cuda")
def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent."""
    out = x.new_empty((x.shape[0], packed.rows), dtype=out_dtype or x.dtype)
    return product(x, packed.packed, bias, out, None)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scales: tuple[Tensor, Tensor] | None, group: int = 0
) -> Tensor:
    """out [T,N] = x [T,K] times the weight's [N,K] transpose, plus bias.

    `scales`: of rows of float8 x and weight; with a `group` > 0 the weight's are [G,N], of that many inputs each.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    if rows:
        config = tuned("linear", x.device.index, rows=rows, outputs=outputs, bytes=x.element_size())
        block_m, block_n = config["tile"]
        block_k = config.get("step", BLOCK_K) if scales is None else BLOCK_K
        grid = (triton.cdiv(rows, block_m) * triton.cdiv(outputs, block_n),)
        linear_kernel[grid](
            x, weight, out if bias is None else bias, out, *(scales or (out, out)), rows, outputs, inputs, x.stride(0),
            scales is not None, group, bias is not None, inputs % block_k == 0, BAND, block_m, block_n, block_k,
            num_warps=config["warps"], num_stages=config["stages"], **EXACT,
        )  # fmt: skip
    return out


@dense.gated_linear.implement("triton", device="cuda")
def gated_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    both = linear(x, packed, bias)
    return both if activation is None else elementwise.gated(both, activation == "gelu_tanh")


@dense.linear.implement("cublas", device="cuda")
def linear_by_cublas(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Not batch-invariant: a row's bits may depend on the number of rows."""
    if out_dtype is None or out_dtype == x.dtype:
        return functional.linear(x, packed.packed, bias)
    sums = torch.mm(x, packed.packed.t(), out_dtype=out_dtype)
    return sums if bias is None else sums.add_(bias)


@dense.gated_linear.implement("cublas", device="cuda")
def gated_by_cublas(x: Tensor, packed: PackedWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    """As `linear_by_cublas`, gated."""
    both = linear_by_cublas(x, packed, bias)
    return both if activation is None else elementwise.gated(both, activation == "gelu_tanh")
