"""Processors of logits, one object per sampling parameter or group of them; `pipeline` has their order.

Each keeps the parameters of its requests by slot and edits only the rows that need it.  Parameters that could make
logits overflow float32, or so large that the noise of sampling is lost in their rounding, mark their row as extreme:
its values are clamped after the penalties, and its maximum is subtracted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve import ops
from tokserve.ops.sampling import FEW
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import Float32, GrammarBitmask, Int32, NewRow
from tokserve.runner.logits import LogitRows, LogitsBuffer
from tokserve.runner.tables.slots import Int64, Slots

INF = float("inf")
MAX_LOGIT = float(np.finfo(np.float32).max)
# within one of these limits, the logits of a model are rounded by less than 0.001
MIN_PLAIN_TEMPERATURE, MAX_PLAIN_BIAS, MAX_PLAIN_REPETITION = 2.0**-7, 2.0**8, 2.0**4
MAX_IDS_PER_PART = 1 << 18  # token ids in a list that are handled at a time

Marker = tuple[int, ...]  # its ids; none: it is not looked for


class Processor(Protocol):
    """One step of the pipeline.  `masks`: whether it may leave a row with no token to sample."""

    masks: bool

    @abstractmethod
    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        """Keep a new request's parameters in place of its slot's old ones; whether the request needs the step."""

    def active_rows(self, rows: LogitRows, index: Int64) -> Int64:
        """The rows of `index` that need the step at their positions."""
        return index

    @abstractmethod
    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        """Change the rows `index`, and no others."""


def is_extreme(params: SamplingParams) -> bool:
    """Whether bias, repetition penalty or temperature may make logits of a magnitude that no model gives them."""
    biased = any(abs(bias) > MAX_PLAIN_BIAS for bias in (params.logit_bias or {}).values())
    repetitive = not 1 / MAX_PLAIN_REPETITION <= params.repetition_penalty <= MAX_PLAIN_REPETITION
    return biased or repetitive or 0.0 < params.temperature < MIN_PLAIN_TEMPERATURE


class Bias(Processor):
    """logit_bias: added to the logits of the ids named."""

    masks = False  # the largest number and a logit are the largest number

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases: dict[int, tuple[Int64, Float32]] = {}  # ids and values

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        bias = {token: value for token, value in (params.logit_bias or {}).items() if token < self._vocab_size}
        values = np.clip(np.array(list(bias.values()), np.float64), -MAX_LOGIT, MAX_LOGIT).astype(np.float32)
        self._biases[row.slot] = (np.array(list(bias), np.int64), values)
        return bool(bias)

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        biases = [self._biases[slot] for slot in rows.slots[index].tolist()]
        values = buffer.tensor(np.concatenate([values for _, values in biases]))
        buffer.flat().index_add_(0, buffer.flat_indices(index, [ids for ids, _ in biases]), values)


class TokenIds(Processor):
    """allowed_token_ids: all others are forbidden; bad_token_ids and bad sequences of one: these are."""

    masks = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._keep: dict[int, Int64] = {}
        self._bad: dict[int, Int64] = {}

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        slot = row.slot
        single = [sequence[0] for sequence in params.bad_token_sequences if len(sequence) == 1]
        bad = {*params.bad_token_ids, *single}
        self._keep.pop(slot, None)
        self._bad.pop(slot, None)
        if params.allowed_token_ids is not None:
            self._keep[slot] = _ids(set(params.allowed_token_ids) - bad, self._vocab_size)
        elif bad:
            self._bad[slot] = _ids(bad, self._vocab_size)
        return slot in self._keep or slot in self._bad

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        slots = rows.slots[index].tolist()
        keeps = np.array([slot in self._keep for slot in slots], np.bool_)
        for part in _parts(index[~keeps], [self._bad[slot] for slot in slots if slot not in self._keep]):
            buffer.flat().index_fill_(0, buffer.flat_indices(*part), -INF)
        for part in _parts(index[keeps], [self._keep[slot] for slot in slots if slot in self._keep]):
            indices = buffer.flat_indices(*part)
            kept = buffer.logits.view(-1).index_select(0, indices)
            buffer.editable().index_fill_(0, buffer.tensor(part[0]), -INF)
            buffer.flat().index_copy_(0, indices, kept)


class BadSequences(Processor):
    """bad_token_sequences: the last id is forbidden where the ids before it are what the row ends with."""

    masks = True

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        # slot -> length of a prefix -> the prefixes [s, length], and the ids [s] that are forbidden after them
        self._sequences: dict[int, dict[int, tuple[Int32, Int64]]] = {}

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        by_length: dict[int, list[list[int]]] = {}
        for sequence in params.bad_token_sequences:
            if len(sequence) > 1 and sequence[-1] < self._vocab_size:
                by_length.setdefault(len(sequence) - 1, []).append(sequence)
        self._sequences[row.slot] = {
            length: (ids[:, :-1].astype(np.int32), ids[:, -1])
            for length, ids in ((length, np.array(ids, np.int64)) for length, ids in by_length.items())
        }
        return bool(by_length)

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        lengths = rows.lengths[index]
        sequences = [self._sequences[slot] for slot in rows.slots[index].tolist()]
        width = int(lengths.max())
        history = self._slots.history(rows.slots[index], width).view(-1)
        for size in sorted({size for of_row in sequences for size in of_row}):
            fits = [row for row, of_row in enumerate(sequences) if size in of_row and size <= lengths[row]]
            if not fits:
                continue
            prefixes, last = zip(*(sequences[row][size] for row in fits), strict=True)
            starts = np.repeat(width * np.array(fits) + lengths[fits] - size, [len(ids) for ids in last])
            ends = history[buffer.tensor(starts[:, None] + np.arange(size))]  # [s, size]
            same = (ends == buffer.tensor(np.concatenate(prefixes))).all(1)
            buffer.forbid(buffer.flat_indices(index[fits], list(last)), same)


class NoRepeatNgrams(Processor):
    """no_repeat_ngram_size n: no n ids occur twice in prompt and output, as in transformers."""

    masks = True

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._sizes: Int64 = np.zeros(len(slots.seeds), np.int64)  # 0: off

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        self._sizes[row.slot] = params.no_repeat_ngram_size
        return params.no_repeat_ngram_size > 0

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        count = max(1, MAX_IDS_PER_PART // int(rows.lengths[index].max() + 1))  # rows at a time
        for first in range(0, len(index), count):
            self._forbid(buffer, rows, index[first : first + count])

    def _forbid(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        lengths, sizes = rows.lengths[index], self._sizes[rows.slots[index]]
        width = int(lengths.max())
        if width == 0:
            return
        ids = self._slots.history(rows.slots[index], width).long()  # [n, width]
        size, length, starts = buffer.tensor(np.stack([sizes, lengths, index * self._vocab_size]))[:, :, None]
        column = torch.arange(width, device=ids.device)
        repeats = (column >= size - 1) & (column < length) & (ids >= 0) & (ids < self._vocab_size)
        for back in range(1, min(int(sizes.max()), width)):  # the n-gram that ends here has the row's id that far back
            same = ids[:, :-back] == ids.gather(1, (length - back).clamp(min=0))
            repeats[:, back:] &= same | (size <= back)
        buffer.forbid((starts + ids.clamp(0, self._vocab_size - 1)).view(-1), repeats.view(-1))


class MinTokens(Processor):
    """min_tokens: until there are that many, EOS and the ids that would end the request are forbidden."""

    masks = True

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._min_tokens: Int64 = np.zeros(len(slots.seeds), np.int64)
        self._ids: dict[int, Int64] = {}

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        self._min_tokens[row.slot] = params.min_tokens
        self._ids[row.slot] = _ids(row.stop_ids, self._vocab_size)
        return params.min_tokens > 0 and bool(row.stop_ids)

    def active_rows(self, rows: LogitRows, index: Int64) -> Int64:
        if not rows.sampling:
            return index[:0]
        num_output = rows.lengths[index] - rows.prompt_lens[index]
        return index[num_output < self._min_tokens[rows.slots[index]]]

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        ids = [self._ids[slot] for slot in rows.slots[index].tolist()]
        buffer.flat().index_fill_(0, buffer.flat_indices(index, ids), -INF)


class ForcedTokens(Processor):
    """trace_decode_token_ids: all but the id at the position is forbidden, whatever else the request forbids."""

    masks = False

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}  # by slot

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        self._ids[row.slot] = params.trace_decode_token_ids or []
        return bool(self._ids[row.slot])

    def active_rows(self, rows: LogitRows, index: Int64) -> Int64:
        if not rows.sampling:
            return index[:0]
        lengths = np.array([len(self._ids[slot]) for slot in rows.slots[index].tolist()], np.int64)
        return index[rows.lengths[index] - rows.prompt_lens[index] < lengths]

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        at = (rows.lengths[index] - rows.prompt_lens[index]).tolist()
        ids = [self._ids[slot][place] for slot, place in zip(rows.slots[index].tolist(), at, strict=True)]
        target = buffer.tensor(np.array(ids, np.int64)[:, None])
        forced = torch.full_like(buffer.rows(index), -INF)
        buffer.set_rows(index, forced.scatter_(1, target, 0.0))


class ThinkingBudget(Processor):
    """thinking_token_budget: in reasoning with so many tokens, all but the next id of the marker that ends it are
    forbidden.  Tokens of complete markers do not count; those of all thoughts of an output count together."""

    masks = True

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._budgets: Int64 = np.zeros(len(slots.seeds), np.int64)
        self._inside: NDArray[np.bool_] = np.zeros(len(slots.seeds), np.bool_)
        self._markers: dict[int, tuple[Marker, Marker]] = {}  # before and after, by slot

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        markers = params.thinking_markers
        if params.thinking_token_budget is None or markers is None:
            return False
        opens, closes = tuple(markers.opens), tuple(markers.closes)
        inside = markers.inside
        if inside is None:
            prompt = row.tokens[: row.prompt_len]
            inside = last_end(prompt, opens) > last_end(prompt, closes)
        self._budgets[row.slot], self._inside[row.slot] = params.thinking_token_budget, inside
        self._markers[row.slot] = (opens, closes)
        return True

    def active_rows(self, rows: LogitRows, index: Int64) -> Int64:
        if not rows.sampling:
            return index[:0]
        num_output = rows.lengths[index] - rows.prompt_lens[index]
        return index[num_output >= self._budgets[rows.slots[index]]]

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        by_markers: dict[tuple[Marker, Marker], list[int]] = {}
        for row, slot in zip(index.tolist(), rows.slots[index].tolist(), strict=True):
            by_markers.setdefault(self._markers[slot], []).append(row)
        for (opens, closes), of_markers in by_markers.items():
            self._limit(buffer, rows, np.array(of_markers, np.int64), opens, closes)

    def _limit(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64, opens: Marker, closes: Marker) -> None:
        """Forbid all but the next id of `closes` in those rows whose reasoning has used its budget."""
        slots, prompts = rows.slots[index], rows.prompt_lens[index]
        first, width = int(prompts.min()) - 1, int(rows.lengths[index].max())  # a column before every output
        columns = np.stack([prompts - first, rows.lengths[index] - first, self._budgets[slots], self._inside[slots]])
        start, length, budget, inside = buffer.tensor(columns)
        thoughts = Thoughts(self._slots.history(slots, width)[:, first:], start, length, inside != 0, opens, closes)
        at_limit = thoughts.inside & (thoughts.num_tokens >= budget)
        target = buffer.tensor(np.array(closes, np.int64))[thoughts.progress][:, None]
        logits = buffer.rows(index)
        limited = logits.masked_fill(at_limit[:, None], -INF)
        buffer.set_rows(index, limited.scatter(1, target, logits.gather(1, target)))


class Thoughts:
    """The reasoning in outputs, computed where their tokens are.

    `ids` [n, w]: the outputs are in the columns from `start`, which is at least 1, to before `length`; both are [n].
    `begins_inside` [n]: the output begins in a thought.  Of each row, [n]: `inside`: whether it ends in a thought;
    `num_tokens`: of all its thoughts, without those of complete markers; `progress`: with how many ids of `closes` its
    thought ends.
    """

    def __init__(
        self, ids: Tensor, start: Tensor, length: Tensor, begins_inside: Tensor, opens: Marker, closes: Marker
    ) -> None:
        column = torch.arange(ids.shape[1], device=ids.device)
        in_output = (column >= start[:, None]) & (column < length[:, None])
        opened, closed = (in_output & ends_of(ids, marker, start) for marker in (opens, closes))
        last_open, last_close = (torch.where(ends, column + 1, 0).cummax(1).values for ends in (opened, closed))
        after = (last_open > last_close) | (begins_inside[:, None] & (last_close == 0))  # whether a thought goes on
        before = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1) & in_output
        self.num_tokens = before.sum(1) - len(closes) * (before & closed).sum(1)
        last = length[:, None] - 1
        self.inside = after.gather(1, last)[:, 0]
        begin = torch.maximum(last_open.gather(1, last)[:, 0], start)
        self.progress = torch.zeros_like(length)
        for size in range(1, len(closes)):
            tail = (length[:, None] - size + torch.arange(size, device=ids.device)).clamp(min=0)
            same = torch.ones_like(self.inside)
            for token, column_ids in zip(closes[:size], ids.gather(1, tail).unbind(1), strict=True):
                same = same & (column_ids == token)
            self.progress = torch.where(same & (length - size >= begin), size, self.progress)


def ends_of(ids: Tensor, marker: Marker, start: Tensor) -> Tensor:
    """The columns [n, w] bool in which the marker ends that lies at or behind column `start` [n]."""
    column = torch.arange(ids.shape[1], device=ids.device)
    ends = (column + 1 - len(marker) >= start[:, None]) & bool(marker)
    for back, token in enumerate(reversed(marker)):
        ends[:, back:] &= ids[:, : max(0, ids.shape[1] - back)] == token
    return ends


def last_end(ids: Int32, marker: Marker) -> int:
    """The number of ids up to the end of the last occurrence of the marker; 0: there is none."""
    size = len(marker)
    if not size or len(ids) < size:
        return 0
    windows = np.lib.stride_tricks.sliding_window_view(ids, size)
    places = np.flatnonzero((windows == np.array(marker)).all(1))
    return int(places[-1]) + size if len(places) else 0


class GrammarMask(Processor):
    """structured_outputs: ids that the step's bitmask forbids.  A row with several logits has as many masks in the
    bitmask, one after the other in the order of its positions."""

    masks = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.bitmask: GrammarBitmask | None = None  # of the step under way

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        return params.structured_outputs is not None

    def active_rows(self, rows: LogitRows, index: Int64) -> Int64:
        return index if rows.sampling and rows.has_grammar else index[:0]

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        if self.bitmask is None:
            raise ValueError("a row with a grammar has no mask")
        masks: dict[int, list[int]] = {}
        for number, slot in reversed(list(enumerate(self.bitmask.slots.tolist()))):
            masks.setdefault(slot, []).append(number)
        slots = rows.slots[index].tolist()
        if any(len(masks.get(slot, ())) < count for slot, count in Counter(slots).items()):
            raise ValueError("a row with a grammar has fewer masks than logits")
        words = self.bitmask.bits[[masks[slot].pop() for slot in slots]]
        packed = buffer.tensor(words.astype("<u4", copy=False).view(np.uint8))[:, :, None]  # [n, 4 W, 1]
        bits = packed >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1  # [n, 4 W, 8]
        forbidden = bits.flatten(1)[:, : self._vocab_size] == 0
        buffer.set_rows(index, buffer.rows(index).masked_fill(forbidden, -INF))


class Penalties(Processor):
    """repetition over prompt and output, presence and frequency over output."""

    masks = False

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._columns: Float32 = np.zeros((3, len(slots.seeds)), np.float32)  # presence, frequency, repetition
        self._extreme: NDArray[np.bool_] = np.zeros(len(slots.seeds), np.bool_)

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        penalties = (params.presence_penalty, params.frequency_penalty, min(params.repetition_penalty, MAX_LOGIT))
        self._columns[:, row.slot] = penalties
        self._extreme[row.slot] = is_extreme(params)
        return penalties != (0.0, 0.0, 1.0)

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        slots, lengths = rows.slots[index], rows.lengths[index]
        presence, frequency, repetition = buffer.tensor(self._columns.take(slots, axis=1))
        prompt_lens = buffer.tensor(rows.prompt_lens[index].astype(np.int32))
        history = self._slots.history(slots, int(lengths.max()))
        penalized = ops.penalize(
            buffer.rows(index),
            history,
            prompt_lens,
            buffer.tensor(lengths.astype(np.int32)),
            presence,
            frequency,
            repetition,
        )
        extreme = self._extreme[slots]
        if extreme.any():
            clamped = buffer.tensor(extreme)[:, None] & (buffer.rows(index) > -INF)  # forbidden ids stay so
            penalized = penalized.clamp(-MAX_LOGIT, MAX_LOGIT).where(clamped, penalized)
        buffer.set_rows(index, penalized)


class ShiftByMax(Processor):
    """Extreme rows minus their largest logit: no probability changes, and logits that can be sampled are near zero."""

    masks = False

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        return is_extreme(params)

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        logits = buffer.rows(index)
        buffer.set_rows(index, logits - logits.amax(1, keepdim=True).clamp(min=-MAX_LOGIT))


class Temperature(Processor):
    """logits / T.  Dividing the other rows by 1 changes no bit of them."""

    masks = False

    def __init__(self, slots: Slots) -> None:
        self._column = slots.temperature

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        return bool(self._column[row.slot] != 1.0)

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        temperature = buffer.tensor(self._column[rows.slots])[:, None]
        buffer.logits = torch.div(buffer.logits, temperature, out=buffer.buffer)


class Filter(Processor):
    """top_k, then top_p, then min_p; greedy rows need none of them."""

    masks = False  # the most probable token always stays

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self._slots = slots
        self._vocab_size = vocab_size

    def assign(self, row: NewRow, params: SamplingParams) -> bool:
        slots, slot = self._slots, row.slot
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        neutral = top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0
        needed = not (neutral or slots.greedy[slot])
        columns = (top_k, params.top_p, params.min_p) if needed else (0, 1.0, 0.0)
        slots.top_k[slot], slots.top_p[slot], slots.min_p[slot] = columns
        return needed

    def apply(self, buffer: LogitsBuffer, rows: LogitRows, index: Int64) -> None:
        slots = rows.slots[index]
        columns = self._slots.top_k, self._slots.top_p, self._slots.min_p
        top_k, top_p, min_p = (buffer.tensor(column[slots]) for column in columns)
        buffer.set_rows(index, ops.filter_logits(buffer.rows(index), top_k, top_p, min_p, self.few(slots)))

    def few(self, slots: Int32) -> bool:
        """Whether a top-k leaves few ids, in each of these slots that has a top-k or a top-p."""
        top_k, top_p = self._slots.top_k[slots], self._slots.top_p[slots]
        return bool(((top_k <= FEW) & ((top_k > 0) | (top_p == 1.0))).all())

    def all_few(self, slots: Int32) -> bool:
        """Whether each of these slots is greedy or has a top-k that leaves few ids."""
        top_k = self._slots.top_k[slots]
        return bool((self._slots.greedy[slots] | ((top_k > 0) & (top_k <= FEW))).all())


def _ids(ids: Iterable[int], vocab_size: int) -> Int64:
    """The ids that the vocabulary has, each once."""
    return np.array(sorted({token for token in ids if 0 <= token < vocab_size}), np.int64)


def _parts(index: Int64, ids: list[Int64]) -> Iterator[tuple[Int64, list[Int64]]]:
    """The rows and their lists of ids in runs that hold about MAX_IDS_PER_PART ids, or one longer list."""
    ends = np.cumsum([len(row_ids) for row_ids in ids], dtype=np.int64)
    cuts = [0, *(np.flatnonzero(np.diff(ends // MAX_IDS_PER_PART)) + 1).tolist(), len(ids)]
    for first, last in pairwise(cuts):
        if first < last:
            yield index[first:last], ids[first:last]
