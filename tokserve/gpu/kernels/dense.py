"""Matrix products on the GPU: a batch-invariant one for exact serving, cuBLAS for fast serving.

The batch-invariant product accumulates each output over K in ascending order in one chain of the matrix unit, or, where
the weight has few outputs, in two or four chains over equal parts of K, which are added in ascending order.  How many
follows from the weight's shape alone; tiles over M and N, the size of a step of K, and whether one program computes all
chains of an output are chosen by M and N, which changes no bit.  cuBLAS picks its order of summation by the shape of
the call, so a row's bits depend on the size of the batch; it serves exact products only in pieces of sizes for which it
was seen to give the same bits (`accept_library`).  Weights keep the checkpoint's layout, so an embedding tied to the
head shares its memory.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tokserve.gpu import candidates
from tokserve.gpu.kernels import elementwise
from tokserve.gpu.kernels.launch import (
    COUNTERS,
    cdiv,
    counters,
    is_dependent,
    is_last_of,
    launch_dependents,
    launched,
    only_compiles,
    prefetch,
    torch_device,
    tuned,
    wait_for_inputs,
)
from tokserve.gpu.kernels.products import by_tma, early
from tokserve.gpu.kernels.products.tiles import BAND, add_step, store_product, tile_of
from tokserve.gpu.kernels.rows.chains import MOST_ROWS, unadded
from tokserve.ops import dense
from tokserve.ops.dense import PackedWeight
from tokserve.ops.float8 import STEP

BLOCK_K = 64  # inputs of one step, unless the table says otherwise
FLOAT8_STEP = 128  # the same where both are float8, and part of the arithmetic; 64 where scales change in between
CHAINS = ((2048, 4), (4096, 2))  # outputs up to which a weight has so many; part of the arithmetic
LEAST_CHAIN = 256  # inputs of a chain are multiples of this, or there is one chain
MOST_APART = 64  # rows up to which chains have programs of their own, unless the table says otherwise
LIBRARY_ROWS = (2048, 1024)  # numbers of rows that a library is given
_accepted: set[tuple[int, int, torch.dtype]] = set()  # outputs, inputs and dtype of weights that it may multiply
PREFETCHED = tl.constexpr(8)  # lines of 64 inputs, for each output


@triton.jit
def chain_sums(
    x_ptrs,
    weight_ptrs,
    weight_scale_ptr,
    x_valid,
    weight_valid,
    output,
    outputs,
    inputs,
    first,
    length,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products of inputs first .. first + length - 1, summed in ascending order: [M,N] float32; of int8, int32."""
    step = tl.arange(0, BLOCK_K)
    INTEGERS: tl.constexpr = x_ptrs.dtype.element_ty == tl.int8
    sums = tl.zeros([x_ptrs.shape[0], weight_ptrs.shape[0]], tl.int32 if INTEGERS else tl.float32)
    for start in range(first, first + length, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs + start, mask=x_valid, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=weight_valid, other=0.0)
        else:
            remaining = (step < inputs - start)[None, :]
            x = tl.load(x_ptrs + start, mask=x_valid & remaining, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=weight_valid & remaining, other=0.0)
        sums = add_step(sums, x, weight, weight_scale_ptr, start, output, outputs, outputs, SCALED, GROUP, BLOCK_K)
    return sums


@triton.jit
def all_chains(x_ptrs, weight_ptrs, x_valid, weight_valid, inputs, length, BLOCK_K: tl.constexpr):
    """The chains of `length` inputs one after the other, and their sum in ascending order: [M,N] float32.

    For tiles of 16 rows.  One loop over all chains loads the first inputs of a chain while the chain before ends.
    wgmma, which multiplies larger tiles, would have to wait in each step of such a loop; mma.sync does so anyway.
    """
    sums = tl.zeros([x_ptrs.shape[0], weight_ptrs.shape[0]], tl.float32)
    total = tl.zeros([x_ptrs.shape[0], weight_ptrs.shape[0]], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        if (start % length == 0) & (start > 0):
            total += sums
            sums = tl.zeros([x_ptrs.shape[0], weight_ptrs.shape[0]], tl.float32)
        x = tl.load(x_ptrs + start, mask=x_valid, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=weight_valid, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    return total + sums


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    part_ptr,
    count_ptr,
    rows,
    outputs,
    inputs,
    x_stride,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINS: tl.constexpr,
    APART: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of x W^T + bias; EVEN: BLOCK_K divides a chain's inputs; SCALED: of float8 or int8, a scale a row.

    GROUP > 0: the weight's scales are [inputs / GROUP, outputs]; BLOCK_K divides it.  CHAINS parts of the inputs are
    summed by themselves, and their sums added in ascending order.  APART: each by a program of its own, which leaves
    it in part_ptr [CHAINS,rows,outputs] float32; if ADDS, the last one of a tile adds them.
    """
    row, output = tile_of(rows, outputs, BAND, BLOCK_M, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    length = inputs // CHAINS
    first = tl.program_id(1) * length if APART else 0
    if DEPENDENT:
        line = first + tl.arange(0, PREFETCHED) * 64
        line = tl.minimum(line, inputs - 1)
        prefetch(weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs + line[None, :])
        wait_for_inputs(DEPENDENT)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    weight_ptrs = weight_ptr + output.to(tl.int64)[:, None] * inputs + step[None, :]
    x_valid, weight_valid = (row < rows)[:, None], (output < outputs)[:, None]
    if APART or CHAINS == 1:
        total = chain_sums(
            x_ptrs,
            weight_ptrs,
            weight_scale_ptr,
            x_valid,
            weight_valid,
            output,
            outputs,
            inputs,
            first,
            length,
            SCALED,
            GROUP,
            EVEN,
            BLOCK_K,
        )
    elif BLOCK_M < 64:
        total = all_chains(x_ptrs, weight_ptrs, x_valid, weight_valid, inputs, length, BLOCK_K)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for chain in range(CHAINS):
            total += chain_sums(
                x_ptrs,
                weight_ptrs,
                weight_scale_ptr,
                x_valid,
                weight_valid,
                output,
                outputs,
                inputs,
                chain * length,
                length,
                SCALED,
                GROUP,
                EVEN,
                BLOCK_K,
            )
    launch_dependents(DEPENDENT)
    offset = row.to(tl.int64)[:, None] * outputs + output[None, :]
    valid = (row < rows)[:, None] & (output < outputs)[None, :]
    if APART:
        size = rows.to(tl.int64) * outputs
        tl.store(part_ptr + tl.program_id(1) * size + offset, total, mask=valid)
        is_last = is_last_of(count_ptr + tl.program_id(0), 1, CHAINS) if ADDS else False
        if is_last:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for chain in tl.static_range(CHAINS):
                total += tl.load(part_ptr + chain * size + offset, mask=valid, other=0.0, cache_modifier=".cg")
            store_product(
                total,
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
    else:
        store_product(
            total,
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


@dense.pack_linear.implement("cublas", device="cuda")
@dense.pack_linear.implement("triton", device="cuda")
@dense.pack_gated.implement("cublas", device="cuda")
@dense.pack_gated.implement("triton", device="cuda")
def pack(weight: Tensor, rows: int | None = None, first: int = 0, into: PackedWeight | None = None) -> PackedWeight:
    """A copy of the weight on the GPU."""
    if into is None:
        rows, columns = len(weight) if rows is None else rows, weight.shape[1]
        copy = torch.empty(rows, columns, dtype=weight.dtype, device=torch_device())
        into = PackedWeight(rows, columns, weight.dtype, copy)
    into.packed[first : first + len(weight)].copy_(weight)
    return into


@dense.embedding.implement("cublas", device="cuda")
@dense.embedding.implement("triton", device="cuda")
def embedding(ids: Tensor, packed: PackedWeight, multiplier: float = 1.0) -> Tensor:
    rows = functional.embedding(ids, packed.packed)
    return rows if multiplier == 1.0 else rows.mul_(multiplier)


@dense.linear.implement("triton", device="cuda")
def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of x need not be adjacent.  What `leaves_chains` is returned unadded."""
    parts = chains(packed.rows, packed.columns)
    if parts > 1 and (out_dtype or x.dtype) == x.dtype and leaves_chains(len(x)):
        left = x.new_empty((parts, len(x), packed.rows), dtype=torch.float32)
        out = product(x, packed.packed, None, x.new_empty((len(x), packed.rows)), None, 0, left)
        return unadded(out, left, bias)
    return plain_linear(x, packed, bias, out_dtype)


def leaves_chains(rows: int) -> bool:
    """Whether a product of so many rows and several chains is left to the next kernel to add."""
    return candidates.is_on("chains_next") and 0 < rows <= MOST_ROWS


def plain_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """`linear`, with its chains added."""
    out = x.new_empty((x.shape[0], packed.rows), dtype=out_dtype or x.dtype)
    first = 0
    if bias is None and out.dtype == x.dtype and x.is_contiguous() and is_library_used(len(x), packed):
        for size in LIBRARY_ROWS:
            while len(x) - first >= size:
                by_library(x[first : first + size], packed.packed, out[first : first + size])
                first += size
    product(x[first:] if first else x, packed.packed, bias, out[first:] if first else out, None)
    return out


def by_library(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [T,N] = x [T,K] times the weight's [N,K] transpose, summed as the library does for these sizes."""
    torch.mm(x, weight.t(), out=out)


def is_library_used(rows: int, packed: PackedWeight) -> bool:
    """Whether it multiplies some of so many rows.  No captured step does: graphs would share the library's workspace,
    which goes when one of them does."""
    return rows >= LIBRARY_ROWS[-1] and _kind(packed) in _accepted and not _is_capturing()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _kind(packed: PackedWeight) -> tuple[int, int, torch.dtype]:
    return packed.rows, packed.columns, packed.packed.dtype


@dense.accept_library.implement("triton", device="cuda")
def accept_library(packed: PackedWeight) -> bool:
    """cuBLASLt without room to split K, asked with each number of rows that it will be given, twice: what it computes
    depends on sizes, not on values, so these bits speak for all contiguous rows.  It gets no others: another stride or
    alignment may choose another algorithm."""
    kind = _kind(packed)
    _accepted.discard(kind)
    if chains(packed.rows, packed.columns) > 1 or kind[2] == torch.float32:
        return False
    _unsplit_library()
    for size in LIBRARY_ROWS:
        for _ in range(2):
            x = torch.randn(size, packed.columns, device=packed.packed.device).to(kind[2])
            both = x.new_empty(2, size, packed.rows)
            by_library(x, packed.packed, both[0])
            product(x, packed.packed, None, both[1], None)
            if not torch.equal(both[0], both[1]):
                return False
    if only_compiles():  # the library may not be accepted where these kernels serve
        return False
    _accepted.add(kind)
    return True


def _unsplit_library() -> None:
    """torch reads the variables when it first calls the library, which exact serving does only here."""
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    if torch.cuda.is_available():
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    group: int = 0,
    left: Tensor | None = None,
) -> Tensor:
    """out [T,N] = x [T,K] times the weight's [N,K] transpose, plus bias.

    `scales`: of rows of x and weight, of float8 or int8; with a `group` > 0 the weight's are [G,N], of that many inputs
    each.  `left` [chains,T,N] float32: where the sums of chains are left; then `out` is not written.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    parts = chains(outputs, inputs) if scales is None else 1
    if scales is None and early.fits(x, weight, parts):
        return early.product(x, weight, bias, out, parts, None, left)
    if by_tma.fits(x, weight, parts):
        step = BLOCK_K if scales is None else float8_step(group)
        return by_tma.product(x, weight, bias, out, parts, step, scales, group)
    if rows:
        device = x.device.index
        config = tuned("linear", device, rows=rows, outputs=outputs, bytes=x.element_size())
        block_m, block_n = config["tile"]
        block_k = config.get("step", BLOCK_K) if scales is None else float8_step(group)
        grid = (cdiv(rows, block_m) * cdiv(outputs, block_n), parts)
        apart = parts > 1 and grid[0] <= COUNTERS and config.get("apart", rows <= MOST_APART)
        apart = apart or left is not None
        memory = left
        if memory is None:
            memory = x.new_empty((parts, rows, outputs), dtype=torch.float32) if apart else out
        linear_kernel[grid if apart else grid[:1]](
            x,
            weight,
            out if bias is None else bias,
            out,
            *(scales or (out, out)),
            memory,
            counters(x.device) if apart else out,
            rows,
            outputs,
            inputs,
            x.stride(0),
            scales is not None,
            group,
            bias is not None,
            inputs // parts % block_k == 0,
            BAND,
            block_m,
            block_n,
            block_k,
            parts,
            apart,
            left is None,
            is_dependent(device),
            num_warps=config["warps"],
            num_stages=config["stages"],
            **launched(device),
        )
    return out


def chains(outputs: int, inputs: int) -> int:
    """Parts of the inputs that are summed by themselves: by the weight's shape alone, as they are part of the
    arithmetic.  Narrow weights have too few tiles for a GPU when there are few rows.  (Of float8 there is one: it adds
    up in other registers than those that a step fills, and a third set does not fit.)"""
    count = next((count for most, count in CHAINS if outputs <= most), 1)
    return count if inputs % (count * LEAST_CHAIN) == 0 else 1


def float8_step(group: int) -> int:
    """Inputs that the matrix unit sums up in float8; part of the arithmetic."""
    return FLOAT8_STEP if group % FLOAT8_STEP == 0 else STEP


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
    """`linear_by_cublas`, gated."""
    both = linear_by_cublas(x, packed, bias)
    return both if activation is None else elementwise.activate(both, activation, True)
