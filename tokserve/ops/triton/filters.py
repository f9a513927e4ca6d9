"""Filters and penalties of logits on the GPU: top-k, top-p and min-p.

What a row keeps are the entries whose key, the order of the float and then the lower id, is at least the row's cutoff.
Rows with a small top-k find it among the largest entries of each slice of the vocabulary, in parallel.  In the others
one program determines a threshold digit by digit, without a sort.  Counts and the masses of top-p are integers, whose
sums do not depend on order, so both ways come to the same cutoff.
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
MAX_K = 64  # top-k up to this is found slice by slice
NEG_INF = tl.constexpr(float("-inf"))
MIN_KEY = tl.constexpr(-(1 << 63))
MAX_KEY = tl.constexpr((1 << 63) - 1)
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


@triton.jit
def keys(x, id):
    """Keys of entries: int64 numbers in the order of the floats x, among equals the lower id above the others."""
    order = ordered(x).to(tl.int64) - 2147483648
    return order * 4294967296 + (4294967295 - id.to(tl.int64))


@triton.jit
def value_of_key(key):
    """The float of this key."""
    return value_of(((key >> 32) + 2147483648).to(tl.uint32))


@triton.jit
def is_small(top_k, width, MAX_K: tl.constexpr):
    """Whether the cutoff is found among the largest entries of each slice."""
    return (top_k > 0) & (top_k <= MAX_K) & (top_k < width)


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr"])
def largest_kernel(logits_ptr, top_k_ptr, key_ptr, max_ptr, width, slices, MAX_K: tl.constexpr, SLICE: tl.constexpr):
    """One slice of a row: its largest entry, and with a small top-k the keys of its top_k largest [MAX_K]."""
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = slice * SLICE + tl.arange(0, SLICE)
    top_k = tl.load(top_k_ptr + row)
    x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
    tl.store(max_ptr + row * slices + slice, tl.max(x, 0))
    if is_small(top_k, width, MAX_K):
        key = tl.where(id < width, keys(x, id), MIN_KEY)
        for i in range(top_k):
            best = tl.max(key, 0)
            tl.store(key_ptr + (row * slices + slice) * MAX_K + i, best)
            key = tl.where(key == best, MIN_KEY, key)


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"])
def cutoff_kernel(
    logits_ptr, top_k_ptr, top_p_ptr, key_ptr, max_ptr, row_max_ptr, cutoff_ptr, width, slices,
    MAX_K: tl.constexpr, SLICES: tl.constexpr, SWEEP: tl.constexpr,
):  # fmt: skip
    """One row: its largest entry, and the cutoff that top-k and top-p come to."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    slice = tl.arange(0, SLICES)
    row_max = tl.max(tl.load(max_ptr + row * slices + slice, mask=slice < slices, other=NEG_INF), 0)
    cutoff = tl.full([1], MIN_KEY, tl.int64)
    if is_small(top_k, width, MAX_K):
        candidate = tl.arange(0, SLICES * MAX_K)
        given = (candidate < slices * MAX_K) & (candidate % MAX_K < top_k)
        key = tl.load(key_ptr + row * slices * MAX_K + candidate, mask=given, other=MIN_KEY)
        place = tl.arange(0, MAX_K)
        best = tl.full([MAX_K], MIN_KEY, tl.int64)  # descending
        for i in range(top_k):
            largest = tl.max(key, 0)
            best = tl.where(place == i, largest, best)
            key = tl.where(key == largest, MIN_KEY, key)
        kept = place < top_k
        if top_p < 1.0:
            mass = tl.where(kept, masses(value_of_key(best), row_max), 0)
            target = mass_target(tl.sum(mass, 0), top_p)
            kept = kept & (tl.cumsum(mass, 0) - mass < target)
        cutoff = tl.min(tl.where(kept, best, MAX_KEY), 0) + tl.zeros([1], tl.int64)
    elif (top_p < 1.0) | ((top_k > 0) & (top_k < width)):
        limit, num_ties = searched(logits_ptr, row, width, row_max, top_k, top_p, SWEEP)
        passed = tl.zeros([1], tl.int64)
        last = tl.zeros([SWEEP], tl.int64)
        for start in range(0, width, SWEEP):
            id = start + tl.arange(0, SWEEP)
            x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
            tie = ((ordered(x) == limit) & (id < width)).to(tl.int64)
            last = tl.maximum(last, tl.where((tie > 0) & (passed + tl.cumsum(tie, 0) <= num_ties), id, 0))
            passed += tl.sum(tie, 0)
        cutoff = (limit.to(tl.int64) - 2147483648) * 4294967296 + (4294967295 - tl.max(last, 0))
    tl.store(cutoff_ptr + row + tl.arange(0, 1), cutoff)
    tl.store(row_max_ptr + row, row_max)


@triton.jit
def mass_target(total, top_p):
    """The mass that top-p asks for of the mass `total`: int64, at least 1."""
    target = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(target, total), 1)


@triton.jit
def searched(logits_ptr, row, width, row_max, top_k, top_p, SWEEP: tl.constexpr):
    """The order above which entries are kept, and how many of those equal to it are: uint32 [1], int64 [1]."""
    limit = tl.zeros([1], tl.uint32)
    num_ties = tl.zeros([1], tl.int64) + width
    if (top_k > 0) & (top_k < width):
        limit = find_threshold(logits_ptr, row, width, row_max, top_k, False, SWEEP)
        num_ties = top_k - above(logits_ptr, row, width, row_max, limit, False, SWEEP) + tl.zeros([1], tl.int64)
    if top_p < 1.0:
        total = above(logits_ptr, row, width, row_max, limit, True, SWEEP) + tl.zeros([1], tl.int64)
        if (top_k > 0) & (top_k < width):
            total += num_ties * masses(value_of(limit), row_max)
        target = mass_target(total, top_p)
        limit = find_threshold(logits_ptr, row, width, row_max, target, True, SWEEP)
        one = tl.maximum(masses(value_of(limit), row_max), 1)
        num_ties = (target - above(logits_ptr, row, width, row_max, limit, True, SWEEP) + one - 1) // one
    return limit, num_ties


@triton.jit(do_not_specialize_on_alignment=["min_p_ptr"])
def filter_kernel(logits_ptr, min_p_ptr, row_max_ptr, cutoff_ptr, out_ptr, width, SLICE: tl.constexpr):
    """One slice of a row: keep entries from the cutoff on that are probable enough for min-p."""
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = slice * SLICE + tl.arange(0, SLICE)
    min_p = tl.load(min_p_ptr + row)
    x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
    keep = keys(x, id) >= tl.load(cutoff_ptr + row)
    if min_p > 0.0:
        keep = keep & (tl.exp(x - tl.load(row_max_ptr + row)) >= min_p)
    tl.store(out_ptr + row * width + id, tl.where(keep, x, NEG_INF), mask=id < width)


@sampling.filter_logits.implement("triton", device="cuda")
def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    logits = logits.contiguous()
    rows, width = logits.shape
    out = torch.empty_like(logits)
    if rows:
        size = min(SLICE, max(16, triton.next_power_of_2(width)))
        slices = triton.cdiv(width, size)
        best = logits.new_empty((rows, slices, MAX_K), dtype=torch.int64)
        maxima, row_maxima = logits.new_empty((rows, slices)), logits.new_empty(rows)
        cutoffs = logits.new_empty(rows, dtype=torch.int64)
        largest_kernel[(rows, slices)](
            logits, top_k, best, maxima, width, slices, MAX_K, size, num_warps=warps(size), **EXACT
        )
        cutoff_kernel[(rows,)](
            logits, top_k, top_p, best, maxima, row_maxima, cutoffs, width, slices,
            MAX_K, triton.next_power_of_2(slices), min(SWEEP, size), num_warps=16, **EXACT,
        )  # fmt: skip
        filter_kernel[(rows, slices)](
            logits, min_p, row_maxima, cutoffs, out, width, size, num_warps=warps(size), **EXACT
        )
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
