"""Filters and penalties of logits on the GPU: top-k, top-p and min-p.

Thresholds are determined digit by digit in the order of the floats, without a sort; counts and the masses of top-p are
integers, whose sums do not depend on order; among equals the lower id wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.ops import sampling
from tokserve.ops.triton.launch import EXACT, warps
from tokserve.ops.triton.sampling import ordered

SLICE = 4096  # vocabulary entries of one program
SWEEP = 1024  # entries per step of a threshold search
CHUNK = 1024  # tokens of a history that one program counts
NEG_INF = tl.constexpr(float("-inf"))
UNIT = tl.constexpr(float(1 << 40))  # masses are counted in 2^-40 of the most probable entry's
DIGIT_BITS = tl.constexpr(4)
DIGITS = tl.constexpr(16)


@triton.jit
def masses(x, row_max):
    """Probability of x relative to that of `row_max`, in units: int64."""
    return (tl.exp(x - row_max) * UNIT).to(tl.int64)


@triton.jit
def find_threshold(logits_ptr, row, width, row_max, target, MASS: tl.constexpr, SWEEP: tl.constexpr):
    """The largest t such that entries of order t or more have at least `target` in count, or in mass: uint32."""
    prefix = tl.zeros([1], tl.uint32)
    shift = tl.zeros([1], tl.uint32) + (32 - DIGIT_BITS)
    digit = tl.arange(0, DIGITS).to(tl.uint32)[None, :]
    for _ in range(32 // DIGIT_BITS):
        pivot = prefix[:, None] + (digit << shift[:, None])
        count = tl.zeros([SWEEP, DIGITS], tl.int64)
        for start in range(0, width, SWEEP):
            id = start + tl.arange(0, SWEEP)
            x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
            one = masses(x, row_max) if MASS else (id < width).to(tl.int64)
            count += tl.where(ordered(x)[:, None] >= pivot, one[:, None], 0)
        enough = (tl.sum(count, 0) >= target).to(tl.int32)  # ones, then zeros; the first is one
        prefix += (tl.sum(enough, 0) - 1).to(tl.uint32) << shift
        shift -= DIGIT_BITS
    return prefix


@triton.jit
def above(logits_ptr, row, width, row_max, limit, MASS: tl.constexpr, SWEEP: tl.constexpr):
    """Count, or mass, of the entries whose order is above `limit`: int64."""
    count = tl.zeros([SWEEP], tl.int64)
    for start in range(0, width, SWEEP):
        id = start + tl.arange(0, SWEEP)
        x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
        one = masses(x, row_max) if MASS else (id < width).to(tl.int64)
        count += tl.where((ordered(x) > limit) & (id < width), one, 0)
    return tl.sum(count, 0)


@triton.jit
def value_of(order):
    """The float of this order."""
    bits = order.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr", "min_p_ptr"])
def filter_kernel(logits_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, width, SWEEP: tl.constexpr):
    """One row: keep entries above a limit, and the first `num_ties` of those equal to it."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    maxima = tl.full([SWEEP], NEG_INF, tl.float32)
    for start in range(0, width, SWEEP):
        id = start + tl.arange(0, SWEEP)
        maxima = tl.maximum(maxima, tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF))
    row_max = tl.max(maxima, 0)
    limit = tl.zeros([1], tl.uint32)
    num_ties = tl.zeros([1], tl.int64) + width
    if (top_k > 0) & (top_k < width):
        limit = find_threshold(logits_ptr, row, width, row_max, top_k, False, SWEEP)
        num_ties = top_k - above(logits_ptr, row, width, row_max, limit, False, SWEEP) + tl.zeros([1], tl.int64)
    if top_p < 1.0:
        if (top_k > 0) & (top_k < width):
            total = above(logits_ptr, row, width, row_max, limit, True, SWEEP) + num_ties * masses(
                value_of(limit), row_max
            )
        else:
            total = above(logits_ptr, row, width, row_max, limit, True, SWEEP) + tl.zeros([1], tl.int64)
        target = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        target = tl.maximum(tl.minimum(target, total), 1)
        limit = find_threshold(logits_ptr, row, width, row_max, target, True, SWEEP)
        one = tl.maximum(masses(value_of(limit), row_max), 1)
        num_ties = (target - above(logits_ptr, row, width, row_max, limit, True, SWEEP) + one - 1) // one
    passed = tl.zeros([1], tl.int64)
    for start in range(0, width, SWEEP):
        id = start + tl.arange(0, SWEEP)
        x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
        order = ordered(x)
        at = (order == limit).to(tl.int64)
        keep = (order > limit) | ((at > 0) & (passed + tl.cumsum(at, 0) <= num_ties))
        if min_p > 0.0:
            keep = keep & (tl.exp(x - row_max) >= min_p)
        tl.store(out_ptr + row * width + id, tl.where(keep, x, NEG_INF), mask=id < width)
        passed += tl.sum(at, 0)


@sampling.filter_logits.implement("triton", device="cuda")
def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    logits = logits.contiguous()
    rows, width = logits.shape
    out = torch.empty_like(logits)
    if rows:
        filter_kernel[(rows,)](logits, top_k, top_p, min_p, out, width, SWEEP, num_warps=16, **EXACT)
    return out


@triton.jit(do_not_specialize=["length"])
def count_kernel(history_ptr, prompt_len_ptr, len_ptr, count_ptr, length, width, CHUNK: tl.constexpr):
    """A chunk of one row's history: adds 2 to a token's count per output, and sets bit 0 if the prompt has it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    present = (at < length) & (at < tl.load(len_ptr + row))
    token = tl.load(history_ptr + row * length + at, mask=present, other=0)
    output = at >= tl.load(prompt_len_ptr + row)
    tl.atomic_add(count_ptr + row * width + token, 2, mask=present & output, sem="relaxed")
    tl.atomic_or(count_ptr + row * width + token, 1, mask=present & (at < tl.load(prompt_len_ptr + row)), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["presence_ptr", "frequency_ptr", "repetition_ptr"])
def penalize_kernel(
    logits_ptr, count_ptr, presence_ptr, frequency_ptr, repetition_ptr, out_ptr, width, SLICE: tl.constexpr
):
    """A slice of one row: repetition, then frequency, then presence."""
    row = tl.program_id(0).to(tl.int64)
    id = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    valid = id < width
    x = tl.load(logits_ptr + row * width + id, mask=valid, other=0.0)
    seen = tl.load(count_ptr + row * width + id, mask=valid, other=0)
    factor = tl.load(repetition_ptr + row) + tl.zeros_like(x)
    count = (seen >> 1).to(tl.float32)
    x = tl.where(seen > 0, tl.where(x > 0.0, tl.div_rn(x, factor), x * factor), x)
    x = x - count * tl.load(frequency_ptr + row)
    x = x - tl.where(count > 0.0, tl.load(presence_ptr + row), 0.0)
    tl.store(out_ptr + row * width + id, x, mask=valid)


@sampling.penalize.implement("triton", device="cuda")
def penalize(
    logits: Tensor,
    history: Tensor,
    prompt_lens: Tensor,
    lens: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    logits = logits.contiguous()
    rows, width = logits.shape
    length = history.shape[1]
    out = torch.empty_like(logits)
    seen = torch.zeros(rows, width, dtype=torch.int32, device=logits.device)
    if rows and length:
        count_kernel[(rows, triton.cdiv(length, CHUNK))](
            history.contiguous(), prompt_lens, lens, seen, length, width, CHUNK, num_warps=4, **EXACT
        )
    if rows:
        size = min(SLICE, max(16, triton.next_power_of_2(width)))
        penalize_kernel[(rows, triton.cdiv(width, size))](
            logits, seen, presence, frequency, repetition, out, width, size, num_warps=warps(size), **EXACT
        )
    return out
