"""References of the ops on logits: penalties, filters, seeded sampling, and logprobs.

A row's result depends on that row's inputs only: randomness is a function of (seed, position, vocabulary index), sums
run over fixed slices or strictly in order, and among equals the lower id wins.  Rows that an op leaves unchanged cost
nothing.  The caller divides by the temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokserve.ops.registry import op

SLICE = 4096  # vocabulary entries of one partial sum
CANDIDATES = 1024  # most probable entries that top-p examines before it sorts a whole row
FEW = 64  # a top-k up to this is found among the largest entries of each slice, where an implementation does so
PHILOX_BLOCKS = 1 << 15  # generated at a time: their integers stay in the cache
LOW = 0xFFFFFFFF
NEG_INF = float("-inf")
EXACT = {torch.float32: (0.0, 0.0)}
WHOLE_VOCABULARY, MASK_TOO_LONG = -1, -2  # in place of a number of kept ids; as in `params`


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox 4x32-10 (Salmon et al., SC 2011) of uint32 values held in int64 tensors: four of the same."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the 64 bits are those of the unsigned product
        c0, c1, c2, c3 = (second >> 32 & LOW) ^ c1 ^ k0, second & LOW, (first >> 32 & LOW) ^ c3 ^ k1, first & LOW
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return [c0, c1, c2, c3]


@op(tolerance=EXACT)
def sample(logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
    """A token id [R] int64 for each row of logits [R,V] float32; -inf is never sampled.

    Greedy rows ([R] bool) take the largest logit, the lowest id of equals.  The others take the largest of logit +
    Gumbel noise made from Philox with key seeds [R] int64 and counter (id // 4, positions [R] int64, 0), lane id % 4.
    """
    rows = (~greedy).nonzero()[:, 0]
    if len(rows) == 0:
        return logits.argmax(-1)
    noisy = logits.clone()
    noisy[rows] = _perturbed(logits[rows], seeds[rows], positions[rows])
    return noisy.argmax(-1)


def _perturbed(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    count, width = logits.shape
    blocks = torch.nn.functional.pad(logits, (0, -width % 4), value=NEG_INF).view(count, -1, 4)
    row, block = (blocks > NEG_INF).any(-1).nonzero(as_tuple=True)  # blocks of four ids with one that can be sampled
    for at in range(0, len(row), PHILOX_BLOCKS):
        r, b = row[at : at + PHILOX_BLOCKS], block[at : at + PHILOX_BLOCKS]
        seed, position = seeds[r], positions[r]
        counter = (b, position & LOW, position >> 32 & LOW, torch.zeros_like(b))
        bits = torch.stack(philox(counter, (seed & LOW, seed >> 32 & LOW)), -1)  # [n,4]
        uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
        blocks[r, b] -= torch.log(-torch.log1p(-uniform))
    return blocks.view(count, -1)[:, :width]


@op(tolerance=EXACT)
def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, few: bool = False) -> Tensor:
    """logits [R,V] with -inf where top_k [R] int32 (0: off), then top_p [R] (1: off), then min_p [R] (0: off) forbid.

    top-p keeps the smallest set of most probable ids that has top_p of the mass that top-k keeps; at least one id.
    min-p drops ids less probable than min_p times the most probable one.  `few`: every row that has a top_k or a top_p
    has a top_k up to FEW, which saves work and changes nothing.
    """
    width = logits.shape[1]
    limited = (top_k > 0) & (top_k < width)
    rows = (limited | (top_p < 1.0)).nonzero()[:, 0]
    out = logits.clone()
    if len(rows):
        part = logits[rows]
        limit = torch.where(limited, top_k, width)[rows].long()
        out[rows] = part.masked_fill_(~_best(part, _num_kept(part, limit, top_p[rows])), NEG_INF)
    rows = (min_p > 0.0).nonzero()[:, 0]
    if len(rows):
        part = out[rows]
        ratio = torch.exp(part - part.amax(-1, keepdim=True))
        out[rows] = part.masked_fill_(ratio < min_p[rows, None], NEG_INF)
    return out


def _num_kept(logits: Tensor, limit: Tensor, top_p: Tensor) -> Tensor:
    """How many of the most probable entries of each row [n,V] top-k (`limit` [n]) and top-p [n] keep: [n]."""
    width = logits.shape[1]
    count = limit.clone()
    rows, max_candidates = (top_p < 1.0).nonzero()[:, 0], min(CANDIDATES, width)
    while len(rows):
        candidates = int(limit[rows].where(limit[rows] < width, max_candidates).max())
        count[rows] = _nucleus(logits[rows], limit[rows], top_p[rows], candidates)
        rows, max_candidates = (count < 0).nonzero()[:, 0], width
    return count


def _nucleus(logits: Tensor, limit: Tensor, top_p: Tensor, candidates: int) -> Tensor:
    """How many entries make up top_p, from the largest `candidates`: [n]; -1 where these do not hold it."""
    width = logits.shape[1]
    values = logits.topk(candidates).values  # [n,C], descending; which of equals does not matter
    mass = torch.exp(values - values[:, :1]).double()
    up_to = mass.cumsum(-1)  # in order, hence the same for any C
    last = (limit.clamp(max=candidates) - 1)[:, None]
    total = up_to.gather(1, last)[:, 0]  # the mass that top-k keeps
    rows = (limit == width).nonzero()[:, 0]
    if len(rows):
        total[rows] = _row_sum(torch.exp(logits[rows] - values[rows, :1]).double())
    target = (top_p.double() * total)[:, None]
    inside = torch.arange(candidates) < limit[:, None]
    kept = (inside & (up_to - mass < target)).sum(-1).clamp(min=1)
    return torch.where((limit > candidates) & (kept == candidates), -1, kept)


def _best(logits: Tensor, count: Tensor) -> Tensor:
    """True at the `count` [n] largest entries of each row [n,V], lower ids first among equals: [n,V]."""
    values = logits.topk(int(count.max())).values
    last = values.gather(1, (count - 1)[:, None])
    above, equal = logits > last, logits == last
    room = count - above.sum(-1)
    for row in (equal.sum(-1) > room).nonzero()[:, 0].tolist():
        equal[row] &= equal[row].cumsum(0) <= room[row]
    return above | equal


def _row_sum(x: Tensor) -> Tensor:
    """Sums of the rows of x [n,V], by fixed slices: [n].  (torch cuts one long row by the number of threads.)"""
    count, width = x.shape
    return torch.nn.functional.pad(x, (0, -width % SLICE)).view(count, -1, SLICE).sum(-1).sum(-1)


@op(tolerance={torch.float32: (1e-6, 1e-6)})
def penalize(
    logits: Tensor,
    history: Tensor,
    prompt_lens: Tensor,
    lens: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """logits [R,V] after the penalties [R] each, in this order: repetition, frequency, presence.

    history [R,L] int32: prompt_lens [R] prompt tokens, output up to lens [R], then anything.  Repetition (1: off)
    divides positive and multiplies negative logits of tokens in prompt or output.  Frequency is subtracted once per
    occurrence in the output, presence once if it occurs there.
    """
    rows = ((presence != 0.0) | (frequency != 0.0) | (repetition != 1.0)).nonzero()[:, 0]
    out = logits.clone()
    if len(rows) == 0 or history.shape[1] == 0:
        return out
    part, ids = logits[rows], history[rows].long()
    column = torch.arange(ids.shape[1])
    present = column < lens[rows, None]
    generated = (present & (column >= prompt_lens[rows, None])).float()
    ids = ids.clamp(min=0)
    seen = torch.zeros_like(part).scatter_add_(1, ids, present.float()) > 0.0
    count = torch.zeros_like(part).scatter_add_(1, ids, generated)
    factor = repetition[rows, None]
    part = torch.where(seen, torch.where(part > 0.0, part / factor, part * factor), part)
    part = part - count * frequency[rows, None]
    out[rows] = part - (count > 0.0).float() * presence[rows, None]
    return out


@op(tolerance={torch.float32: (4e-6, 4e-7)})
def logprobs(
    logits: Tensor, token_ids: Tensor, k: int, named: Tensor | None, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log softmax of logits [R,V] (divided by temperature [R], where it is not 0) at some ids.

    Returns the logprob float32 [R] and the rank int32 [R] (1 + how many logits are greater) of token_ids [R], then
    int32 ids and float32 logprobs [R,k+m]: the k most probable in descending order, lower ids first among equals, and
    after them named [R,m].
    """
    columns = [token_ids[:, None], largest_ids(logits, k)]
    if named is not None:
        columns.append(named)
    ids = torch.cat(columns, -1)  # [R,1+k+m]
    rank = 1 + (logits > logits.gather(1, ids[:, :1])).sum(-1)
    if temperature is not None:
        logits = logits / temperature.where(temperature != 0.0, 1.0)[:, None]
    top = logits.amax(-1, keepdim=True)  # [R,1]
    shifted = logits - top
    values = shifted.gather(1, ids) - torch.log(_row_sum(torch.exp(shifted)))[:, None]
    return values[:, 0].contiguous(), rank.int(), ids[:, 1:].int(), values[:, 1:].contiguous()


def largest_ids(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest logits of each row, descending, lower ids first among equals: [R,k]."""
    if k == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    order = (logits + 0.0).view(torch.int32).long()  # + 0.0: there is one zero
    order = torch.where(order < 0, order ^ 0x7FFFFFFF, order)  # integers in the order of the floats
    distinct = order * (1 << 32) + (LOW - torch.arange(logits.shape[1], device=logits.device))
    return distinct.topk(k).indices


@op(tolerance={torch.float32: (4e-6, 4e-7)})
def sample_fused(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy: Tensor,
    temperature: Tensor | None,
    scaled: bool,
    k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`sample` from logits [R,V] / temperature [R] (None, or 0: 1) and, if k >= 0, `logprobs` of the sampled ids.

    Returns ids int64 [R]; whether the row's largest logit is finite, bool [R]; then what `logprobs` returns for the k
    most probable, of the logits or (`scaled`) of logits / temperature, all of it empty if k < 0.  A row whose largest
    logit is not finite (NaN if the row has any) counts as zeros.  Bit for bit the result of the two ops.
    """
    finite = logits.amax(-1).isfinite()
    logits = work = logits.where(finite[:, None], 0.0)
    if temperature is not None:
        work = logits / temperature.where(temperature != 0.0, 1.0)[:, None]
    ids = sample.reference(work, seeds, positions, greedy)
    if k < 0:
        floats, whole = torch.empty(0), torch.empty(0, dtype=torch.int32)
        return ids, finite, floats, whole, whole.view(0, 0), floats.view(0, 0)
    return ids, finite, *logprobs.reference(logits, ids, k, None, temperature if scaled else None)


@op(tolerance={torch.float32: (4e-6, 4e-7)})
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
    """`sample_fused`, but the ids are drawn from what `filter_logits` leaves of logits / temperature.

    A row is greedy and has no filters, or its top_k is at least 1, at most FEW, and less than V.  Bit for bit the
    result of the ops.
    """
    finite = logits.amax(-1).isfinite()
    work = logits.where(finite[:, None], 0.0) / temperature.where(temperature != 0.0, 1.0)[:, None]
    ids = sample.reference(filter_logits.reference(work, top_k, top_p, min_p, True), seeds, positions, greedy)
    if k < 0:
        floats, whole = torch.empty(0), torch.empty(0, dtype=torch.int32)
        return ids, finite, floats, whole, whole.view(0, 0), floats.view(0, 0)
    logits = logits.where(finite[:, None], 0.0)
    return ids, finite, *logprobs.reference(logits, ids, k, None, temperature if scaled else None)


@op(tolerance={torch.float32: (4e-6, 4e-7)})
def sampling_mask(
    logits: Tensor, processed: Tensor, token_ids: Tensor, greedy: Tensor, temperature: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What each of token_ids [R] int64 was drawn from: the ids of `processed` [R,V] that are not -inf, or, of greedy
    rows ([R] bool), the token alone.

    Returns their number int32 [R] (WHOLE_VOCABULARY if these are all whose `logits` [R,V] are not -inf, MASK_TOO_LONG
    if more than `limit`); their ids int32, ascending, all rows one after the other, of negative numbers none (there may
    be more entries than that, which mean nothing: a device need not know how many there are); the
    logarithm of the mass that they have in the softmax of logits / temperature [R] (0: 1), float32 [R], 0 if whole;
    and the log softmax of `processed` over them at the token, float32 [R], the bits of `logprobs`.
    """
    rows = torch.arange(len(logits), device=logits.device)
    kept = processed > NEG_INF
    kept = torch.where(greedy[:, None], torch.arange(logits.shape[1], device=logits.device) == token_ids[:, None], kept)
    count = kept.sum(-1)
    whole, too_long = count == (logits > NEG_INF).sum(-1), count > limit
    ids = (kept & ~(whole | too_long)[:, None]).nonzero()[:, 1].int()
    scaled = logits / temperature.where(temperature != 0.0, 1.0)[:, None]
    part = scaled.masked_fill(~kept, NEG_INF)
    top, part_top = scaled.amax(-1, keepdim=True), part.amax(-1, keepdim=True)
    mass, part_mass = _row_sum(torch.exp(scaled - top)), _row_sum(torch.exp(part - part_top))
    kept_logprobs = (part_top - top)[:, 0] + (torch.log(part_mass) - torch.log(mass))
    work = processed.masked_fill(~kept, NEG_INF)
    shifted = work - work.amax(-1, keepdim=True)
    values = shifted[rows, token_ids] - torch.log(_row_sum(torch.exp(shifted)))
    numbers = torch.where(whole, WHOLE_VOCABULARY, torch.where(too_long, MASK_TOO_LONG, count)).int()
    return numbers, ids, torch.where(whole, 0.0, kept_logprobs.clamp(max=0.0)), values
