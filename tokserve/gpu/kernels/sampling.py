"""From logits to a token on the GPU: the vocabulary is divided into slices, one per program, that are merged per row.

Slices are fixed and merge in order; among equals the lower id wins.  Log softmax is never written out: a logprob is
computed from a row's maximum and sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokserve.gpu.kernels.launch import EXACT, cdiv, next_power_of_2, warps
from tokserve.gpu.kernels.sums import tree_sum
from tokserve.ops import sampling

SLICE = 4096  # vocabulary entries of one program
SWEEP = 1024  # entries that one program of a whole row reads at a time
NOISE_SWEEP = 256  # entries of a row without finite logits that one warp draws for at a time
TOP_SIZES = (0, 8, 64)  # limits of k that kernels are compiled for; beyond the last, torch selects the ids
NEG_INF = tl.constexpr(float("-inf"))
MIN_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def gumbel(seed, position, block, COUNT: tl.constexpr):
    """Noise for the ids of `block` [COUNT / 4], four per Philox block: [COUNT] float32."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    none = tl.zeros_like(block)
    a, b, c, d = tl.philox(
        seed, block, none + low.to(tl.int32, bitcast=True), none + high.to(tl.int32, bitcast=True), none
    )
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [COUNT])
    uniform = tl.minimum(
        (bits.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08
    )
    rest = 1.0 - uniform
    small = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    log1p = tl.where(rest == 1.0, uniform, -tl.log(rest) * tl.div_rn(uniform, small))  # -log1p(-uniform)
    return -tl.log(log1p)


@triton.jit
def ordered(x):
    """uint32 numbers in the order of the floats x; the two zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def read(logits_ptr, offset, valid, finite):
    """Logits; zeros in a row that is not finite, -inf outside."""
    x = tl.load(logits_ptr + offset, mask=valid, other=NEG_INF)
    return tl.where(finite, x, tl.where(valid, 0.0, NEG_INF))


@triton.jit
def scaled(x, temperature):
    """Logits over the temperature, correctly rounded."""
    return tl.div_rn(x, temperature + tl.zeros_like(x))


@triton.jit
def row_terms(temperature_ptr, finite_ptr, row, TEMPERATURE: tl.constexpr, FINITE: tl.constexpr):
    """The row's divisor (1 for a temperature of 0), and whether its logits are finite."""
    temperature = 1.0
    finite = True
    if TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
        temperature = tl.where(temperature == 0.0, 1.0, temperature)
    if FINITE:
        finite = tl.load(finite_ptr + row) != 0
    return temperature, finite


@triton.jit
def sample_slice_kernel(
    logits_ptr,
    seed_ptr,
    position_ptr,
    greedy_ptr,
    temperature_ptr,
    best_ptr,
    id_ptr,
    max_ptr,
    width,
    slices,
    TEMPERATURE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Reduce one slice of a row: largest perturbed logit and its id, largest logit."""
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = slice * SLICE + tl.arange(0, SLICE)
    valid = id < width
    temperature, finite = row_terms(temperature_ptr, temperature_ptr, row, TEMPERATURE, False)
    raw = read(logits_ptr, row * width + id, valid, finite)
    offset = row * slices + slice
    has_nan = tl.sum((raw != raw).to(tl.int32), 0) > 0
    slice_max = tl.max(raw, 0)
    tl.store(max_ptr + offset, tl.where(has_nan, float("nan"), slice_max))
    if slice_max == NEG_INF:  # a filter removed the whole slice: it needs no noise
        tl.store(best_ptr + offset, NEG_INF)
        tl.store(id_ptr + offset, slice * SLICE)
    else:
        x = scaled(raw, temperature)
        if tl.load(greedy_ptr + row) == 0:
            block = slice * (SLICE // 4) + tl.arange(0, SLICE // 4)
            x += gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), block, SLICE)
        best, at = tl.max(x, 0, return_indices=True)
        tl.store(best_ptr + offset, best)
        tl.store(id_ptr + offset, slice * SLICE + at)


@triton.jit
def sample_merge_kernel(
    best_ptr,
    id_ptr,
    max_ptr,
    seed_ptr,
    position_ptr,
    greedy_ptr,
    out_ptr,
    finite_ptr,
    width,
    slices,
    SLICES: tl.constexpr,
    SWEEP: tl.constexpr,
):
    """One row: its id, and whether its largest logit is finite.  Where it is not, logits count as zeros."""
    row = tl.program_id(0).to(tl.int64)
    slice = tl.arange(0, SLICES)
    valid = slice < slices
    offset = row * slices + slice
    row_max = tl.load(max_ptr + offset, mask=valid, other=NEG_INF)
    has_nan = tl.sum((row_max != row_max).to(tl.int32), 0) > 0
    row_max = tl.max(row_max, 0)
    finite = (row_max > NEG_INF) & (row_max < float("inf")) & (has_nan == 0)
    value = tl.load(best_ptr + offset, mask=valid, other=NEG_INF)
    id = tl.load(id_ptr + offset, mask=valid, other=0)
    best = tl.min(tl.where(valid & (value == tl.max(value, 0)), id, 0x7FFFFFFF), 0)
    if finite == 0:
        best = 0
        if tl.load(greedy_ptr + row) == 0:
            largest = tl.full([], NEG_INF, tl.float32)
            for start in range(0, width, SWEEP):
                block = start // 4 + tl.arange(0, SWEEP // 4)
                noise = gumbel(tl.load(seed_ptr + row), tl.load(position_ptr + row), block, SWEEP)
                noise = tl.where(start + tl.arange(0, SWEEP) < width, noise, NEG_INF)
                highest, at = tl.max(noise, 0, return_indices=True)
                if highest > largest:
                    largest = highest
                    best = start + at
    tl.store(out_ptr + row, best.to(tl.int64))
    tl.store(finite_ptr + row, finite.to(tl.int8))


def _planes(logits: Tensor, count: int, slices: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """`count` scratch tensors [R,slices], aligned like separate tensors."""
    rows = -(-logits.shape[0] // 4) * 4
    return list(logits.new_empty((count, rows, slices), dtype=dtype).unbind())


def _sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor, temperature: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Ids int64 [R], and whether each row's largest logit is finite, bool [R]."""
    rows, width = logits.shape
    ids, finite = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.int8)
    slices = cdiv(width, SLICE)
    (best, maxima), (best_ids,) = _planes(logits, 2, slices), _planes(logits, 1, slices, torch.int32)
    is_greedy = greedy.view(torch.int8)
    if rows:
        size = min(SLICE, max(4, next_power_of_2(width)))
        sample_slice_kernel[(rows, slices)](
            logits,
            seeds,
            positions,
            is_greedy,
            logits if temperature is None else temperature,
            best,
            best_ids,
            maxima,
            width,
            slices,
            temperature is not None,
            size,
            num_warps=warps(size),
            **EXACT,
        )
        sample_merge_kernel[(rows,)](
            best,
            best_ids,
            maxima,
            seeds,
            positions,
            is_greedy,
            ids,
            finite,
            width,
            slices,
            next_power_of_2(slices),
            min(NOISE_SWEEP, size),
            num_warps=1,
            **EXACT,
        )
    return ids, finite.view(torch.bool)


@sampling.sample.implement("triton", device="cuda")
def sample(logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
    return _sample(logits.contiguous(), seeds, positions, greedy, None)[0]


@triton.jit(do_not_specialize=["k"])
def logprobs_slice_kernel(
    logits_ptr,
    token_ptr,
    temperature_ptr,
    finite_ptr,
    max_ptr,
    sum_ptr,
    greater_ptr,
    candidate_ptr,
    width,
    slices,
    k,
    TOP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    FINITE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Reduce one slice of a row: maximum, sum of exp(x - maximum), entries above the token's, the k largest as keys.

    TOP: upper limit of k.
    """
    row, slice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id = slice * SLICE + tl.arange(0, SLICE)
    valid = id < width
    temperature, finite = row_terms(temperature_ptr, finite_ptr, row, TEMPERATURE, FINITE)
    raw = read(logits_ptr, row * width + id, valid, finite)
    x = scaled(raw, temperature)
    token = read(logits_ptr, row * width + tl.load(token_ptr + row), True, finite)
    offset = row * slices + slice
    row_max = tl.max(x, 0)
    tl.store(max_ptr + offset, row_max)
    tl.store(sum_ptr + offset, tree_sum(tl.where(x == NEG_INF, 0.0, tl.exp(x - row_max))))
    tl.store(greater_ptr + offset, tl.sum((valid & (raw > token)).to(tl.int32), 0))
    if TOP > 0:
        key = (ordered(raw).to(tl.int64) - 2147483648) * 4294967296 + (4294967295 - id.to(tl.int64))
        key = tl.where(valid, key, MIN_KEY)
        for i in range(k):
            best = tl.max(key, 0)
            tl.store(candidate_ptr + offset * k + i, best)
            key = tl.where(key == best, MIN_KEY, key)


@triton.jit(do_not_specialize=["k", "num_named"])
def logprobs_merge_kernel(
    logits_ptr,
    token_ptr,
    temperature_ptr,
    finite_ptr,
    max_ptr,
    sum_ptr,
    greater_ptr,
    candidate_ptr,
    named_ptr,
    logprob_ptr,
    rank_ptr,
    id_ptr,
    value_ptr,
    width,
    slices,
    num_named,
    k,
    TOP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    FINITE: tl.constexpr,
    SLICES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    NAMED: tl.constexpr,
):
    """One row: logprob and rank of its token, then ids and logprobs of its k most probable and of the named ids.

    TOP: upper limit of k.
    """
    row = tl.program_id(0).to(tl.int64)
    slice = tl.arange(0, SLICES)
    offset = row * slices + slice
    maxima = tl.load(max_ptr + offset, mask=slice < slices, other=NEG_INF)
    row_max = tl.max(maxima, 0)
    sums = tl.load(sum_ptr + offset, mask=slice < slices, other=0.0)
    log_sum = tl.log(tree_sum(tl.where(maxima == NEG_INF, 0.0, sums * tl.exp(maxima - row_max))))
    greater = tl.sum(tl.load(greater_ptr + offset, mask=slice < slices, other=0), 0)
    temperature, finite = row_terms(temperature_ptr, finite_ptr, row, TEMPERATURE, FINITE)
    token = scaled(read(logits_ptr, row * width + tl.load(token_ptr + row), True, finite), temperature)
    tl.store(logprob_ptr + row, (token - row_max) - log_sum)
    tl.store(rank_ptr + row, greater + 1)
    out = row * (k + num_named)
    if TOP > 0:
        candidate = tl.arange(0, CANDIDATES)
        key = tl.load(candidate_ptr + row * slices * k + candidate, mask=candidate < slices * k, other=MIN_KEY)
        for i in range(k):
            best = tl.max(key, 0)
            largest = 4294967295 - (best & 4294967295)
            x = scaled(read(logits_ptr, row * width + largest, True, finite), temperature)
            tl.store(id_ptr + out + i, largest.to(tl.int32))
            tl.store(value_ptr + out + i, (x - row_max) - log_sum)
            key = tl.where(key == best, MIN_KEY, key)
    for start in range(0, num_named, NAMED):
        column = start + tl.arange(0, NAMED)
        valid = column < num_named
        id = tl.load(named_ptr + row * num_named + column, mask=valid, other=0)
        named = scaled(read(logits_ptr, row * width + id, valid, finite), temperature)
        tl.store(id_ptr + out + k + column, id.to(tl.int32), mask=valid)
        tl.store(value_ptr + out + k + column, (named - row_max) - log_sum, mask=valid)


def row_logprobs(
    logits: Tensor, token_ids: Tensor, k: int, named: Tensor | None, temperature: Tensor | None, finite: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference; rows that are not `finite` count as zeros.  k < 0: nothing."""
    rows, width = logits.shape
    if k < 0:
        floats, whole = logits.new_empty(0), logits.new_empty(0, dtype=torch.int32)
        return floats, whole, whole.view(0, 0), floats.view(0, 0)
    if k > TOP_SIZES[-1]:
        largest = sampling.largest_ids(logits if finite is None else logits.where(finite[:, None], 0.0), k)
        named, k = largest if named is None else torch.cat((largest, named), -1), 0
    num_named = 0 if named is None else named.shape[1]
    token_logprobs, ranks = logits.new_empty(rows), logits.new_empty(rows, dtype=torch.int32)
    ids, values = logits.new_empty((rows, k + num_named), dtype=torch.int32), logits.new_empty((rows, k + num_named))
    if rows == 0:
        return token_logprobs, ranks, ids, values
    size = min(SLICE, max(16, next_power_of_2(width)))
    slices = cdiv(width, size)
    maxima, sums = _planes(logits, 2, slices)
    greater = ranks.new_empty((rows, slices))
    candidates = logits.new_empty((rows, slices, k), dtype=torch.int64)
    columns = logits if temperature is None else temperature
    flags = greater if finite is None else finite.view(torch.int8)
    top_size = next(size for size in TOP_SIZES if k <= size)
    switches = (k, top_size, temperature is not None, finite is not None)
    logprobs_slice_kernel[(rows, slices)](
        logits,
        token_ids,
        columns,
        flags,
        maxima,
        sums,
        greater,
        candidates,
        width,
        slices,
        *switches,
        size,
        num_warps=warps(size),
        **EXACT,
    )
    logprobs_merge_kernel[(rows,)](
        logits,
        token_ids,
        columns,
        flags,
        maxima,
        sums,
        greater,
        candidates,
        token_ids if named is None else named.contiguous(),
        token_logprobs,
        ranks,
        ids,
        values,
        width,
        slices,
        num_named,
        *switches,
        next_power_of_2(slices),
        next_power_of_2(max(1, slices * top_size)),
        256,
        num_warps=4,
        **EXACT,
    )
    return token_logprobs, ranks, ids, values


@sampling.logprobs.implement("triton", device="cuda")
def logprobs(
    logits: Tensor, token_ids: Tensor, k: int, named: Tensor | None, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return row_logprobs(logits.contiguous(), token_ids, k, named, temperature, None)


@sampling.sample_fused.implement("triton", device="cuda")
def sample_fused(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
    temperature: Tensor | None,
    scaled: bool,
    k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    logits = logits.contiguous()
    ids, finite = _sample(logits, seeds, positions, greedy, temperature)
    return ids, finite, *row_logprobs(logits, ids, k, None, temperature if scaled else None, finite)


@triton.jit(do_not_specialize=["limit"])
def sampling_mask_kernel(
    logits_ptr,
    processed_ptr,
    token_ptr,
    greedy_ptr,
    temperature_ptr,
    count_ptr,
    id_ptr,
    kept_logprob_ptr,
    width,
    limit,
    SWEEP: tl.constexpr,
):
    """One row: how many ids are kept, the ids at the front of the row's `limit` entries, and their mass."""
    row = tl.program_id(0).to(tl.int64)
    temperature, _ = row_terms(temperature_ptr, temperature_ptr, row, True, False)
    token, greedy = tl.load(token_ptr + row), tl.load(greedy_ptr + row) != 0
    maxima = tl.full([SWEEP], NEG_INF, tl.float32)
    kept_maxima = tl.full([SWEEP], NEG_INF, tl.float32)
    counts, possible = tl.zeros([SWEEP], tl.int32), tl.zeros([SWEEP], tl.int32)
    for start in range(0, width, SWEEP):
        id = start + tl.arange(0, SWEEP)
        x = scaled(read(logits_ptr, row * width + id, id < width, True), temperature)
        kept = tl.where(greedy, id == token, read(processed_ptr, row * width + id, id < width, True) > NEG_INF)
        maxima = tl.maximum(maxima, x)
        kept_maxima = tl.maximum(kept_maxima, tl.where(kept, x, NEG_INF))
        counts += kept.to(tl.int32)
        possible += (x > NEG_INF).to(tl.int32)
    row_max, kept_max = tl.max(maxima, 0), tl.max(kept_maxima, 0)
    count = tl.sum(counts, 0)
    whole, too_long = count == tl.sum(possible, 0), count > limit
    listed = tl.where(whole | too_long, 0, 1)
    sums, kept_sums = tl.zeros([SWEEP], tl.float32), tl.zeros([SWEEP], tl.float32)
    written = tl.zeros([1], tl.int32)
    for start in range(0, width, SWEEP):
        id = start + tl.arange(0, SWEEP)
        x = scaled(read(logits_ptr, row * width + id, id < width, True), temperature)
        kept = tl.where(greedy, id == token, read(processed_ptr, row * width + id, id < width, True) > NEG_INF)
        sums += tl.exp(x - row_max)
        kept_sums += tl.where(kept, tl.exp(x - kept_max), 0.0)
        one = kept.to(tl.int32)
        tl.store(id_ptr + row * limit + written + tl.cumsum(one, 0) - 1, id, mask=one * listed > 0)
        written += tl.sum(one, 0)
    kept_logprob = (kept_max - row_max) + (tl.log(tree_sum(kept_sums)) - tl.log(tree_sum(sums)))
    tl.store(kept_logprob_ptr + row, tl.where(whole, 0.0, tl.minimum(kept_logprob, 0.0)))
    tl.store(count_ptr + row, tl.where(whole, -1, tl.where(too_long, -2, count)))


@sampling.sampling_mask.implement("triton", device="cuda")
def sampling_mask(
    logits: Tensor, processed: Tensor, token_ids: Tensor, greedy: Tensor, temperature: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, processed = logits.contiguous(), processed.contiguous()
    rows, width = logits.shape
    counts, ids = logits.new_empty(rows, dtype=torch.int32), logits.new_empty((rows, limit), dtype=torch.int32)
    kept_logprobs = logits.new_empty(rows)
    if rows:
        size = min(SWEEP, max(16, next_power_of_2(width)))
        sampling_mask_kernel[(rows,)](
            logits,
            processed,
            token_ids,
            greedy.view(torch.int8),
            temperature,
            counts,
            ids,
            kept_logprobs,
            width,
            limit,
            size,
            num_warps=warps(size),
            **EXACT,
        )
    values = row_logprobs(processed, token_ids, 0, None, None, None)[0]
    return counts, _joined(ids, counts), kept_logprobs, values.where(~greedy, 0.0)


def _joined(ids: Tensor, counts: Tensor) -> Tensor:
    """The first counts[i] entries of each row of ids [R,L] one after the other, and then anything: [R * L]."""
    rows, limit = ids.shape
    held = counts.clamp(0, limit)
    first, column = held.cumsum(0) - held, torch.arange(limit, device=ids.device)
    place = torch.where(column < held[:, None], first[:, None] + column, rows * limit)
    return ids.new_empty(rows * limit + 1).scatter_(0, place.view(-1), ids.view(-1))[:-1]
