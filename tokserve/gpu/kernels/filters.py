"""Filters and penalties of logits on the GPU: top-k, top-p and min-p.

What a row keeps are the entries whose key, the order of the float and then the lower id, is at least the row's cutoff.
Rows with a small top-k find it among the few entries that are as large as the k-th largest of the maxima of groups.  In
the others it is searched for by a histogram of the entries' order, digit by digit, to which all slices add (radix
select).  Counts and the masses of top-p are integers, whose sums do not depend on order, so both ways come to the same
cutoff.

`sample_few` draws from what a small top-k leaves without writing logits: it divides them by the temperature as it reads
them, and draws from the entries that the cutoff is found among.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT, cdiv, is_last_of, next_power_of_2, warps
from tokserve.gpu.kernels.sampling import gumbel, ordered, row_logprobs, row_terms, scaled
from tokserve.ops import sampling

SLICE = 4096  # vocabulary entries of one program
CHUNK = 1024  # tokens of a history that one program counts
GROUPS = 4  # of a slice; the largest entries of so many groups bound what a small top-k keeps
MAX_K = sampling.FEW  # top-k up to this is found slice by slice
NEG_INF = tl.constexpr(float("-inf"))
MIN_KEY = tl.constexpr(-(1 << 63))
MAX_KEY = tl.constexpr((1 << 63) - 1)
UNIT = tl.constexpr(float(1 << 40))  # masses are counted in 2^-40 of the most probable entry's
DIGITS = ((21, 11), (10, 11), (0, 10))  # of an order, the highest first: where each begins, and its bits
BINS = 2048  # of a digit
# columns of a search's state: digits so far, what lies above them, what is to be reached; of a finished search the
# order at which it ended, how many entries of that order are kept, and how many are not
PREFIX, ABOVE, TARGET, LIMIT, TIES, SURPLUS = (tl.constexpr(i) for i in range(6))
STATE = 6


@triton.jit
def masses(x, row_max):
    """Probability of x relative to that of `row_max`, in units: int64."""
    return (tl.exp(x - row_max) * UNIT).to(tl.int64)


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


@triton.jit
def limit_of(top_k_ptr, greedy_ptr, row, GREEDY: tl.constexpr):
    """The row's top-k; with GREEDY, 1 for a greedy row."""
    top_k = tl.load(top_k_ptr + row)
    if GREEDY:
        top_k = tl.where(tl.load(greedy_ptr + row) != 0, 1, top_k)
    return top_k


@triton.jit
def maxima_kernel(
    logits_ptr,
    temperature_ptr,
    max_ptr,
    key_ptr,
    width,
    slices,
    GROUPS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """One slice of a row: its largest entry, and the largest key of each of its groups [GROUPS].

    TEMPERATURE: keys are those of the entries over the row's, and the largest of entries with a NaN is NaN.
    """
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = slice * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
    largest = tl.max(x, 0)
    if TEMPERATURE:
        largest = tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), largest)
        temperature, _counted = row_terms(temperature_ptr, temperature_ptr, row, TEMPERATURE, False)
        x = scaled(x, temperature)
    tl.store(max_ptr + row * slices + slice, largest)
    key = tl.reshape(tl.where(id < width, keys(x, id), MIN_KEY), [GROUPS, SLICE // GROUPS])
    tl.store(key_ptr + (row * slices + slice) * GROUPS + tl.arange(0, GROUPS), tl.max(key, 1))


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "greedy_ptr"])
def bound_kernel(
    top_k_ptr,
    greedy_ptr,
    temperature_ptr,
    max_ptr,
    key_ptr,
    row_max_ptr,
    finite_ptr,
    bound_ptr,
    width,
    slices,
    MAX_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """One row: its largest entry, and a key that the top_k-th largest entry reaches: that of the top_k-th group.

    TEMPERATURE: the former over the row's, which is 0 if the row's largest entry is not finite, and whether it is.
    """
    row = tl.program_id(0).to(tl.int64)
    top_k = limit_of(top_k_ptr, greedy_ptr, row, TEMPERATURE)
    slice = tl.arange(0, SLICES)
    maxima = tl.load(max_ptr + row * slices + slice, mask=slice < slices, other=NEG_INF)
    row_max = tl.max(maxima, 0)
    if TEMPERATURE:
        has_nan = tl.sum((maxima != maxima).to(tl.int32), 0) > 0
        finite = (row_max > NEG_INF) & (row_max < float("inf")) & (has_nan == 0)
        tl.store(finite_ptr + row, finite.to(tl.int8))
        temperature, _counted = row_terms(temperature_ptr, temperature_ptr, row, TEMPERATURE, False)
        row_max = scaled(tl.where(finite, row_max, 0.0), temperature)
    tl.store(row_max_ptr + row, row_max)
    bound = tl.full([1], MIN_KEY, tl.int64)
    if is_small(top_k, width, MAX_K):
        group = tl.arange(0, SLICES * GROUPS)
        key = tl.load(key_ptr + row * slices * GROUPS + group, mask=group < slices * GROUPS, other=MIN_KEY)
        for _ in range(top_k):
            best = tl.max(key, 0)
            bound = best + tl.zeros([1], tl.int64)
            key = tl.where(key == best, MIN_KEY, key)
    tl.store(bound_ptr + row + tl.arange(0, 1), bound)


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "greedy_ptr"])
def largest_kernel(
    logits_ptr,
    top_k_ptr,
    greedy_ptr,
    temperature_ptr,
    group_ptr,
    bound_ptr,
    key_ptr,
    width,
    slices,
    MAX_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """One slice of a row with a small top-k: the keys [MAX_K] of the entries, top_k at most, that reach the bound.

    TEMPERATURE: of entries over the row's.
    """
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k = limit_of(top_k_ptr, greedy_ptr, row, TEMPERATURE)
    if is_small(top_k, width, MAX_K):
        bound = tl.load(bound_ptr + row)
        slice_max = tl.max(tl.load(group_ptr + (row * slices + slice) * GROUPS + tl.arange(0, GROUPS)), 0)
        place = tl.arange(0, MAX_K)
        largest = tl.full([MAX_K], MIN_KEY, tl.int64)
        if slice_max >= bound:
            id = slice * SLICE + tl.arange(0, SLICE)
            x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
            if TEMPERATURE:
                temperature, _counted = row_terms(temperature_ptr, temperature_ptr, row, TEMPERATURE, False)
                x = scaled(x, temperature)
            key = tl.where(id < width, keys(x, id), MIN_KEY)
            count = 0
            while (count < top_k) & (slice_max >= bound):
                largest = tl.where(place == count, slice_max, largest)
                key = tl.where(key == slice_max, MIN_KEY, key)
                slice_max = tl.max(key, 0)
                count += 1
        tl.store(key_ptr + (row * slices + slice) * MAX_K + place, largest)


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"])
def cutoff_kernel(
    top_k_ptr,
    top_p_ptr,
    key_ptr,
    row_max_ptr,
    cutoff_ptr,
    width,
    slices,
    MAX_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """One row: the cutoff of a small top-k and its top-p; of the others, one that keeps all."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    cutoff = tl.full([1], MIN_KEY, tl.int64)
    if is_small(top_k, width, MAX_K):
        best = best_keys(key_ptr + row * slices * MAX_K, top_k, slices, MAX_K, SLICES)
        kept = most_probable(best, top_k, top_p, tl.load(row_max_ptr + row), MAX_K)
        cutoff = tl.min(tl.where(kept, best, MAX_KEY), 0) + tl.zeros([1], tl.int64)
    tl.store(cutoff_ptr + row + tl.arange(0, 1), cutoff)


@triton.jit
def best_keys(key_ptr, top_k, slices, MAX_K: tl.constexpr, SLICES: tl.constexpr):
    """The top_k largest keys of a row's slices [slices,MAX_K], descending: [MAX_K]."""
    candidate = tl.arange(0, SLICES * MAX_K)
    valid = (candidate < slices * MAX_K) & (candidate % MAX_K < top_k)
    key = tl.load(key_ptr + candidate, mask=valid, other=MIN_KEY)
    place = tl.arange(0, MAX_K)
    best = tl.full([MAX_K], MIN_KEY, tl.int64)
    for i in range(top_k):
        largest = tl.max(key, 0)
        best = tl.where(place == i, largest, best)
        key = tl.where(key == largest, MIN_KEY, key)
    return best


@triton.jit
def most_probable(best, top_k, top_p, row_max, MAX_K: tl.constexpr):
    """Which of a row's `best_keys` top-k and top-p keep: [MAX_K]."""
    kept = tl.arange(0, MAX_K) < top_k
    if top_p < 1.0:
        mass = tl.where(kept, masses(value_of_key(best), row_max), 0)
        target = mass_target(tl.sum(mass, 0), top_p)
        kept = kept & (tl.cumsum(mass, 0) - mass < target)
    return kept


@triton.jit(
    do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr", "min_p_ptr", "greedy_ptr", "seed_ptr", "position_ptr"]
)
def draw_kernel(
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    greedy_ptr,
    seed_ptr,
    position_ptr,
    key_ptr,
    row_max_ptr,
    finite_ptr,
    out_ptr,
    slices,
    MAX_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """One row: the id drawn from what its small top-k, top-p and min-p keep.  A row that is not finite counts as
    zeros."""
    row = tl.program_id(0).to(tl.int64)
    top_k = limit_of(top_k_ptr, greedy_ptr, row, True)
    row_max = tl.load(row_max_ptr + row)
    best = best_keys(key_ptr + row * slices * MAX_K, top_k, slices, MAX_K, SLICES)
    place = tl.arange(0, MAX_K)
    best = tl.where(tl.load(finite_ptr + row) != 0, best, keys(tl.zeros([MAX_K], tl.float32), place))
    kept = most_probable(best, top_k, tl.load(top_p_ptr + row), row_max, MAX_K)
    x = value_of_key(best)
    min_p = tl.load(min_p_ptr + row)
    if min_p > 0.0:
        kept = kept & (tl.exp(x - row_max) >= min_p)
    id = (4294967295 - (best & 4294967295)).to(tl.int32)
    if tl.load(greedy_ptr + row) == 0:
        block = tl.where(kept, id // 4, 0)
        noise = gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), block, 4 * MAX_K)
        of_id = tl.arange(0, 4)[None, :] == (id % 4)[:, None]
        x += tl.sum(tl.where(of_id, tl.reshape(noise, [MAX_K, 4]), 0.0), 1)
    x = tl.where(kept, x, NEG_INF)
    drawn = tl.min(tl.where(kept & (x == tl.max(x, 0)), id, 0x7FFFFFFF), 0)
    tl.store(out_ptr + row, drawn.to(tl.int64))


@triton.jit
def mass_target(total, top_p):
    """The mass that top-p asks for of the mass `total`: int64, at least 1."""
    target = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(target, total), 1)


@triton.jit
def is_searched(top_k, top_p, width, MASS: tl.constexpr, MAX_K: tl.constexpr):
    """Whether the cutoff is searched for; MASS: that of top-p, else that of top-k."""
    limited = (top_k > 0) & (top_k < width)
    return ((top_p < 1.0) & ((top_k > MAX_K) | (limited == 0))) if MASS else (limited & (top_k > MAX_K))


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"])
def search_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    row_max_ptr,
    bin_ptr,
    count_ptr,
    state_ptr,
    width,
    slices,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    MASS: tl.constexpr,
    MAX_K: tl.constexpr,
    SLICE: tl.constexpr,
    BINS: tl.constexpr,
    STATE: tl.constexpr,
):
    """One slice adds a digit of its entries' orders to the row's histogram; the last one picks the row's digit.

    Entries count 1, or with MASS their mass, if they have the digits picked before and top-k keeps their order.
    """
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if is_searched(top_k, top_p, width, MASS, MAX_K):
        state_ptr += row * STATE
        bin_ptr += row * BINS
        row_max = tl.load(row_max_ptr + row)
        id = slice * SLICE + tl.arange(0, SLICE)
        x = tl.load(logits_ptr + row * width + id, mask=id < width, other=NEG_INF)
        order = ordered(x).to(tl.int64)
        one = masses(x, row_max) if MASS else tl.full([SLICE], 1, tl.int64)
        counted = (id < width) & (one > 0)
        if MASS:
            counted = counted & (order >= tl.load(state_ptr + LIMIT))
        if SHIFT + BITS < 32:
            counted = counted & (order >> (SHIFT + BITS) == tl.load(state_ptr + PREFIX))
        tl.atomic_add(bin_ptr + ((order >> SHIFT) & ((1 << BITS) - 1)), one, mask=counted, sem="relaxed")
        if is_last_of(count_ptr + row, 1, slices):
            pick(bin_ptr, state_ptr, row_max, top_k, top_p, SHIFT, BITS, MASS, BINS)


@triton.jit
def pick(
    bin_ptr,
    state_ptr,
    row_max,
    top_k,
    top_p,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    MASS: tl.constexpr,
    BINS: tl.constexpr,
):
    """The largest digit such that entries with this one or a larger one reach the target; empties the bins."""
    digit = tl.arange(0, BINS)
    held = tl.load(bin_ptr + digit, cache_modifier=".cg")
    tl.store(bin_ptr + digit, tl.zeros([BINS], tl.int64))
    total = tl.sum(held, 0)
    above, prefix, target = tl.zeros_like(total), tl.zeros_like(total), total
    if SHIFT + BITS == 32:
        if MASS:
            one = masses(value_of(tl.load(state_ptr + LIMIT).to(tl.uint32)), row_max)
            target = mass_target(total - tl.load(state_ptr + SURPLUS) * one, top_p)
        else:
            target = top_k.to(tl.int64)
    else:
        above, prefix = tl.load(state_ptr + ABOVE), tl.load(state_ptr + PREFIX)
        target = tl.load(state_ptr + TARGET)
    reached = above + total - tl.cumsum(held, 0) + held  # with this digit's entries
    picked = tl.maximum(tl.sum((reached >= target).to(tl.int32), 0) - 1, 0)
    at_digit = tl.sum(tl.where(digit == picked, held, 0), 0)
    above = tl.sum(tl.where(digit == picked, reached, 0), 0) - at_digit
    prefix = (prefix << BITS) + picked
    tl.store(state_ptr + PREFIX, prefix)
    tl.store(state_ptr + ABOVE, above)
    tl.store(state_ptr + TARGET, target)
    if SHIFT == 0:
        tl.store(state_ptr + LIMIT, prefix)
        if MASS:
            one = tl.maximum(masses(value_of(prefix.to(tl.uint32)), row_max), 1)
            tl.store(state_ptr + TIES, (target - above + one - 1) // one)
        else:
            tl.store(state_ptr + TIES, target - above)
            tl.store(state_ptr + SURPLUS, at_digit - (target - above))


@triton.jit(do_not_specialize_on_alignment=["top_k_ptr", "top_p_ptr"])
def ties_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    tie_ptr,
    count_ptr,
    state_ptr,
    cutoff_ptr,
    width,
    slices,
    MAX_K: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    STATE: tl.constexpr,
):
    """One slice counts its entries of the order at which the search ended; the last one finds the row's cutoff."""
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if is_searched(top_k, top_p, width, True, MAX_K) | is_searched(top_k, top_p, width, False, MAX_K):
        limit, kept = tl.load(state_ptr + row * STATE + LIMIT), tl.load(state_ptr + row * STATE + TIES)
        id = slice * SLICE + tl.arange(0, SLICE)
        tl.store(tie_ptr + row * slices + slice, tl.sum(ties(logits_ptr + row * width, id, width, limit), 0))
        if is_last_of(count_ptr + row, 1, slices):
            place = tl.arange(0, SLICES)
            count = tl.load(tie_ptr + row * slices + place, mask=place < slices, other=0, cache_modifier=".cg")
            up_to = tl.cumsum(count, 0)
            last = tl.minimum(tl.sum((up_to < kept).to(tl.int32), 0), slices - 1)
            before = tl.sum(tl.where(place < last, count, 0), 0)
            id = last * SLICE + tl.arange(0, SLICE)
            tie = ties(logits_ptr + row * width, id, width, limit)
            within = (tie > 0) & (before + tl.cumsum(tie, 0) <= kept)
            last_id = tl.max(tl.where(within, id, 0), 0)
            tl.store(cutoff_ptr + row, (limit - 2147483648) * 4294967296 + (4294967295 - last_id.to(tl.int64)))


@triton.jit
def ties(logits_ptr, id, width, limit):
    """1 for each of these entries that has the order `limit`, else 0: int32."""
    x = tl.load(logits_ptr + id, mask=id < width, other=NEG_INF)
    return ((ordered(x).to(tl.int64) == limit) & (id < width)).to(tl.int32)


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
def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, few: bool = False) -> Tensor:
    """`few` saves the launches of a search."""
    logits = logits.contiguous()
    rows, width = logits.shape
    out = torch.empty_like(logits)
    if rows:
        best, row_maxima, _, size = _largest(logits, top_k, None, None)
        slices = cdiv(width, size)
        cutoffs = logits.new_empty(rows, dtype=torch.int64)
        cutoff_kernel[(rows,)](
            top_k,
            top_p,
            best,
            row_maxima,
            cutoffs,
            width,
            slices,
            MAX_K,
            next_power_of_2(slices),
            num_warps=16,
            **EXACT,
        )
        if not few:
            _search(logits, top_k, top_p, row_maxima, cutoffs, size)
        filter_kernel[(rows, slices)](
            logits, min_p, row_maxima, cutoffs, out, width, size, num_warps=warps(size), **EXACT
        )
    return out


@sampling.sample_few.implement("triton", device="cuda")
def sample_few(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    scaled: bool,
    k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reads all logits once, without logprobs."""
    logits = logits.contiguous()
    rows, width = logits.shape
    ids = logits.new_empty(rows, dtype=torch.int64)
    finite = logits.new_empty(rows, dtype=torch.int8)
    if rows:
        is_greedy = greedy.view(torch.int8)
        best, row_maxima, finite, size = _largest(logits, top_k, temperature, is_greedy)
        slices = cdiv(width, size)
        draw_kernel[(rows,)](
            top_k,
            top_p,
            min_p,
            is_greedy,
            seeds,
            positions,
            best,
            row_maxima,
            finite,
            ids,
            slices,
            MAX_K,
            next_power_of_2(slices),
            num_warps=16,
            **EXACT,
        )
    is_finite = finite.view(torch.bool)
    return ids, is_finite, *row_logprobs(logits, ids, k, None, temperature if scaled else None, is_finite)


def _largest(
    logits: Tensor, top_k: Tensor, temperature: Tensor | None, greedy: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The keys of the largest entries [R,slices,MAX_K] of rows with a small top-k; the rows' largest entries [R];
    with a temperature whether these are finite [R] int8; the size of slices.  `temperature` [R]: what entries are
    divided by, and then `greedy` rows [R] int8 have a top-k of 1."""
    rows, width = logits.shape
    size = min(SLICE, max(16, next_power_of_2(width)))
    slices = cdiv(width, size)
    groups = logits.new_empty((rows, slices, GROUPS), dtype=torch.int64)
    best = logits.new_empty((rows, slices, MAX_K), dtype=torch.int64)
    maxima, row_maxima = logits.new_empty((rows, slices)), logits.new_empty(rows)
    bounds, finite = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.int8)
    is_divided = temperature is not None
    divisors, flags = logits if temperature is None else temperature, finite if greedy is None else greedy
    maxima_kernel[(rows, slices)](
        logits, divisors, maxima, groups, width, slices, GROUPS, is_divided, size, num_warps=warps(size), **EXACT
    )
    bound_kernel[(rows,)](
        top_k,
        flags,
        divisors,
        maxima,
        groups,
        row_maxima,
        finite,
        bounds,
        width,
        slices,
        MAX_K,
        GROUPS,
        is_divided,
        next_power_of_2(slices),
        num_warps=1,
        **EXACT,
    )
    largest_kernel[(rows, slices)](
        logits,
        top_k,
        flags,
        divisors,
        groups,
        bounds,
        best,
        width,
        slices,
        MAX_K,
        GROUPS,
        is_divided,
        size,
        num_warps=warps(size),
        **EXACT,
    )
    return best, row_maxima, finite, size


def _search(logits: Tensor, top_k: Tensor, top_p: Tensor, row_maxima: Tensor, cutoffs: Tensor, size: int) -> None:
    """Fill in the cutoffs of rows with top-p alone, or with a top-k that is not small."""
    rows, width = logits.shape
    slices = cdiv(width, size)
    memory = logits.new_zeros(rows * (BINS + STATE + 1), dtype=torch.int64)
    bins, states, counts = memory.split([rows * BINS, rows * STATE, rows])
    ties = logits.new_empty((rows, slices), dtype=torch.int32)
    for of_mass in (False, True):
        for shift, bits in DIGITS:
            search_kernel[(rows, slices)](
                logits,
                top_k,
                top_p,
                row_maxima,
                bins,
                counts,
                states,
                width,
                slices,
                shift,
                bits,
                of_mass,
                MAX_K,
                size,
                BINS,
                STATE,
                num_warps=warps(size),
                **EXACT,
            )
    ties_kernel[(rows, slices)](
        logits,
        top_k,
        top_p,
        ties,
        counts,
        states,
        cutoffs,
        width,
        slices,
        MAX_K,
        size,
        next_power_of_2(slices),
        STATE,
        num_warps=warps(size),
        **EXACT,
    )


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
        count_kernel[(rows, cdiv(length, CHUNK))](
            history.contiguous(), prompt_lens, lens, seen, length, width, CHUNK, num_warps=4, **EXACT
        )
    if rows:
        size = min(SLICE, max(16, next_power_of_2(width)))
        penalize_kernel[(rows, cdiv(width, size))](
            logits, seen, presence, frequency, repetition, out, width, size, num_warps=warps(size), **EXACT
        )
    return out
