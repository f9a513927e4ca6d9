"""What is done to logits before a token is drawn: a list of small objects whose order is the specification.

bias -> allowed and bad ids -> bad sequences -> min_tokens -> grammar -> penalties -> (extreme rows: from the largest)
-> temperature -> top-k, top-p, min-p.
Each object keeps what requests in its care asked for, by slot, and edits only the rows that need it; a
batch in which no row needs anything is not even copied.  What a row becomes depends on its own slot and
history alone, never on the other rows.  Parameters that could make logits overflow float32, or so large that the noise
of a draw is lost in their rounding, mark their row as extreme: its values are clamped after the penalties, and the
largest is subtracted from all.  Nothing is drawn here and no logprob is known here.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve import ops
from tokserve.params import SamplingParams
from tokserve.plan import Float32, Int32, Masks, NewRow
from tokserve.runner.slots import Int64, Slots

INF = float("inf")
MOST = float(np.finfo(np.float32).max)
COLD, LARGE, FACTOR = 2.0**-7, 2.0**8, 2.0**4  # within one of these, logits of a model are rounded by less than 0.001
PART = 1 << 18  # token ids in a list that are handled at a time


@dataclass(slots=True)
class Rows:
    """Whose rows of logits these are, and how much came before the token that each is about.

    `lengths`: tokens before it, which is also its index; the first `prompt_lens` of them count as prompt.
    `drawing` False: the tokens are prompt tokens to be scored, with all before them counted as prompt.
    """

    slots: Int32  # [n]
    lengths: Int64  # [n]
    prompt_lens: Int64  # [n]
    drawing: bool = True


class Work:
    """Logits on their way through the list: the model's own are never written to, a buffer takes their place."""

    def __init__(self, logits: Tensor, buffer: Tensor) -> None:
        self._source = logits
        self.buffer = buffer  # [n, V]
        self.logits = logits  # [n, V]

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """The array beside the logits."""
        return torch.from_numpy(array).to(self.buffer.device)

    def edit(self) -> Tensor:
        """The logits, to be edited in place."""
        if self.logits is self._source:
            self.logits = self.buffer.copy_(self._source)
        return self.logits

    def flat(self) -> Tensor:
        """The logits as one row [n * V], to be edited in place."""
        return self.edit().view(-1)

    def places(self, which: Int64, ids: list[Int64]) -> Tensor:
        """Where `flat` holds ids[0] of row which[0], ids[1] of row which[1], ..."""
        starts = np.repeat(which * self.logits.shape[1], [len(each) for each in ids])
        return self.tensor(starts + np.concatenate(ids))

    def take(self, which: Int64) -> Tensor:
        """The rows `which`."""
        if which.size == self.logits.shape[0]:
            return self.logits
        return self.logits.index_select(0, self.tensor(which))

    def put(self, which: Int64, rows: Tensor) -> None:
        """Replace the rows `which`."""
        if which.size == self.logits.shape[0]:
            self.logits = rows
        else:
            self.edit().index_copy_(0, self.tensor(which), rows)


class Processor(Protocol):
    """One step of the list.  `masks`: whether it may leave a row with nothing to draw; `looks_back`: whether it
    reads the tokens so far.
    """

    masks: bool
    looks_back: bool = False

    @abstractmethod
    def enter(self, row: NewRow) -> bool:
        """Remember what a new request asks for, instead of what its slot had; False if it needs nothing."""

    def due(self, rows: Rows, which: Int64) -> Int64:
        """Those of the rows `which` that need the step now."""
        return which

    @abstractmethod
    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        """Change the rows `which`, and no others."""


class Pipeline:
    """The processors in order, and which of them each slot needs."""

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        temperature = Temperature(slots)
        self.grammar = GrammarMask(vocab_size)
        self.processors: list[Processor] = [
            Bias(vocab_size),
            TokenIds(vocab_size),
            BadSequences(slots, vocab_size),
            MinTokens(slots, vocab_size),
            self.grammar,
            Penalties(slots),
            FromLargest(),
            temperature,
            Filter(slots, vocab_size),
        ]
        self.scaling = 1 << self.processors.index(temperature)  # the bit of the temperature in `needs`
        self._looking_back = sum(1 << i for i, step in enumerate(self.processors) if step.looks_back)
        self._needs: Int64 = np.zeros(len(slots.seeds), np.int64)  # bit i: processor i
        self._needy: set[int] = set()  # slots that need any
        self._buffer = torch.empty(0, vocab_size)  # kept: fresh pages would cost more than the work on them

    def enter(self, row: NewRow) -> None:
        """A request takes a slot."""
        self._needs[row.slot] = sum(1 << i for i, step in enumerate(self.processors) if step.enter(row))
        if self._needs[row.slot]:
            self._needy.add(row.slot)

    def leave(self, slot: int) -> None:
        """The slot is free."""
        self._needs[slot] = 0
        self._needy.discard(slot)

    def looks_back(self, slots: Int32) -> bool:
        """Whether any of these slots has a processor that reads the tokens so far."""
        return bool(self._needy) and bool((self._needs[slots] & self._looking_back).any())

    def needs(self, rows: Rows) -> int:
        """Bit i: some row needs processor i; 0 if all are to be drawn from as they are."""
        return int(np.bitwise_or.reduce(self._needs[rows.slots])) if self._needy else 0

    def run(self, logits: Tensor, rows: Rows) -> tuple[Tensor, NDArray[np.bool_] | None]:
        """Processed logits [n, V], good until the next call (`logits` itself if no row needs anything), and
        which rows still have something to draw (None: all).
        """
        union = self.needs(rows)
        if union == 0:
            return logits, None
        needs = self._needs[rows.slots]
        if self._buffer.shape[0] < logits.shape[0]:
            self._buffer = torch.empty_like(logits)
        work, masked = Work(logits, self._buffer[: logits.shape[0]]), False
        for i, step in enumerate(self.processors):
            if union >> i & 1:
                which = step.due(rows, np.flatnonzero(needs >> i & 1))
                if which.size:
                    step.apply(work, rows, which)
                    masked |= step.masks
        return work.logits, np.isfinite(work.logits.amax(1).cpu().numpy()) if masked else None


def extreme(params: SamplingParams) -> bool:
    """Whether bias, repetition penalty or temperature may make logits of a magnitude that no model gives them."""
    biased = any(abs(bias) > LARGE for bias in (params.logit_bias or {}).values())
    return biased or not 1 / FACTOR <= params.repetition_penalty <= FACTOR or 0.0 < params.temperature < COLD


class Bias(Processor):
    """logit_bias: added to the logits of the ids named."""

    masks = False  # the largest number and a logit are the largest number

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._asked: dict[int, tuple[Int64, Float32]] = {}

    def enter(self, row: NewRow) -> bool:
        bias = {token: value for token, value in (row.params.logit_bias or {}).items() if token < self._vocab_size}
        values = np.clip(np.array(list(bias.values()), np.float64), -MOST, MOST).astype(np.float32)
        self._asked[row.slot] = (np.array(list(bias), np.int64), values)
        return bool(bias)

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        asked = [self._asked[slot] for slot in rows.slots[which].tolist()]
        values = work.tensor(np.concatenate([values for _, values in asked]))
        work.flat().index_add_(0, work.places(which, [ids for ids, _ in asked]), values)


class TokenIds(Processor):
    """allowed_token_ids: all others are forbidden; bad_token_ids and bad sequences of one: these are."""

    masks = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._keep: dict[int, Int64] = {}
        self._bad: dict[int, Int64] = {}

    def enter(self, row: NewRow) -> bool:
        slot, params = row.slot, row.params
        single = [sequence[0] for sequence in params.bad_token_sequences if len(sequence) == 1]
        bad = {*params.bad_token_ids, *single}
        self._keep.pop(slot, None)
        self._bad.pop(slot, None)
        if params.allowed_token_ids is not None:
            self._keep[slot] = _ids(set(params.allowed_token_ids) - bad, self._vocab_size)
        elif bad:
            self._bad[slot] = _ids(bad, self._vocab_size)
        return slot in self._keep or slot in self._bad

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        slots = rows.slots[which].tolist()
        keeps = np.array([slot in self._keep for slot in slots], np.bool_)
        for part in _parts(which[~keeps], [self._bad[slot] for slot in slots if slot not in self._keep]):
            work.flat().index_fill_(0, work.places(*part), -INF)
        for part in _parts(which[keeps], [self._keep[slot] for slot in slots if slot in self._keep]):
            places = work.places(*part)
            kept = work.logits.view(-1).index_select(0, places)
            work.edit().index_fill_(0, work.tensor(part[0]), -INF)
            work.flat().index_copy_(0, places, kept)


class BadSequences(Processor):
    """bad_token_sequences: the last id is forbidden where the ids before it are what the row ends with."""

    masks = True
    looks_back = True

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self._tokens = slots.tokens
        self._vocab_size = vocab_size
        # by slot and by length of what comes before: those ids, as bytes -> the ids that are forbidden after them
        self._asked: dict[int, dict[int, dict[bytes, list[int]]]] = {}

    def enter(self, row: NewRow) -> bool:
        asked: dict[int, dict[bytes, list[int]]] = {}
        for sequence in row.params.bad_token_sequences:
            if len(sequence) > 1 and sequence[-1] < self._vocab_size:
                before = array("i", sequence[:-1])
                asked.setdefault(len(before), {}).setdefault(before.tobytes(), []).append(sequence[-1])
        self._asked[row.slot] = asked
        return bool(asked)

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        places: list[int] = []
        for row, slot, length in zip(
            which.tolist(), rows.slots[which].tolist(), rows.lengths[which].tolist(), strict=True
        ):
            for size, forbidden in self._asked[slot].items():
                if size <= length:
                    ids = forbidden.get(self._tokens[slot, length - size : length].tobytes(), ())
                    places += [row * self._vocab_size + token for token in ids]
        if places:
            work.flat().index_fill_(0, work.tensor(np.array(places, np.int64)), -INF)


class MinTokens(Processor):
    """min_tokens: until there are that many, EOS and the ids that would end the request are forbidden."""

    masks = True

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._least: Int64 = np.zeros(len(slots.seeds), np.int64)
        self._ids: dict[int, Int64] = {}

    def enter(self, row: NewRow) -> bool:
        self._least[row.slot] = row.params.min_tokens
        self._ids[row.slot] = _ids(row.stop_ids, self._vocab_size)
        return row.params.min_tokens > 0 and bool(row.stop_ids)

    def due(self, rows: Rows, which: Int64) -> Int64:
        if not rows.drawing:
            return which[:0]
        made = rows.lengths[which] - rows.prompt_lens[which]
        return which[made < self._least[rows.slots[which]]]

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        ids = [self._ids[slot] for slot in rows.slots[which].tolist()]
        work.flat().index_fill_(0, work.places(which, ids), -INF)


class GrammarMask(Processor):
    """structured_outputs: ids that lead to no sentence of the grammar are forbidden, as each step's plan says."""

    masks = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.step: Masks | None = None  # of the step under way

    def enter(self, row: NewRow) -> bool:
        return row.params.structured_outputs is not None

    def due(self, rows: Rows, which: Int64) -> Int64:
        return which if rows.drawing else which[:0]

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        assert self.step is not None, "a row with a grammar came without its mask"
        place = {slot: i for i, slot in enumerate(self.step.slots.tolist())}
        words = self.step.words[[place[slot] for slot in rows.slots[which].tolist()]]
        packed = work.tensor(words.astype("<u4", copy=False).view(np.uint8))[:, :, None]  # [n, 4 W, 1]
        bits = packed >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1  # [n, 4 W, 8]
        forbidden = bits.flatten(1)[:, : self._vocab_size] == 0
        work.put(which, work.take(which).masked_fill(forbidden, -INF))


class Penalties(Processor):
    """repetition over prompt and output, presence and frequency over output."""

    masks = False
    looks_back = True

    def __init__(self, slots: Slots) -> None:
        self._tokens = slots.tokens
        self._columns: Float32 = np.zeros((3, len(slots.seeds)), np.float32)  # presence, frequency, repetition
        self._extreme: NDArray[np.bool_] = np.zeros(len(slots.seeds), np.bool_)

    def enter(self, row: NewRow) -> bool:
        asked = (row.params.presence_penalty, row.params.frequency_penalty, min(row.params.repetition_penalty, MOST))
        self._columns[:, row.slot] = asked
        self._extreme[row.slot] = extreme(row.params)
        return asked != (0.0, 0.0, 1.0)

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        slots, lengths = rows.slots[which], rows.lengths[which]
        width = int(lengths.max())
        history = self._tokens[slots, :width]  # [n, width]
        history[np.arange(width) >= lengths[:, None]] = -1
        presence, frequency, repetition = work.tensor(self._columns.take(slots, axis=1))
        prompt_lens = work.tensor(rows.prompt_lens[which].astype(np.int32))
        penalized = ops.penalize(
            work.take(which), work.tensor(history), prompt_lens, work.tensor(lengths.astype(np.int32)),
            presence, frequency, repetition,
        )  # fmt: skip
        far = work.tensor(self._extreme[slots])[:, None] & (work.take(which) > -INF)  # what is forbidden stays so
        work.put(which, penalized.clamp(-MOST, MOST).where(far, penalized) if far.any() else penalized)


class FromLargest(Processor):
    """Extreme rows minus their largest logit: no probability changes, and what can be drawn is near zero."""

    masks = False

    def enter(self, row: NewRow) -> bool:
        return extreme(row.params)

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        logits = work.take(which)
        work.put(which, logits - logits.amax(1, keepdim=True).clamp(min=-MOST))


class Temperature(Processor):
    """logits / T.  Dividing the other rows by 1 changes no bit of them."""

    masks = False

    def __init__(self, slots: Slots) -> None:
        self._column = slots.temperature

    def enter(self, row: NewRow) -> bool:
        return bool(self._column[row.slot] != 1.0)

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        temperature = work.tensor(self._column[rows.slots])[:, None]
        work.logits = torch.div(work.logits, temperature, out=work.buffer)


class Filter(Processor):
    """top_k, then top_p, then min_p; greedy rows need none of them."""

    masks = False  # the most probable token always stays

    def __init__(self, slots: Slots, vocab_size: int) -> None:
        max_num_seqs = len(slots.seeds)
        self._greedy = slots.greedy
        self._vocab_size = vocab_size
        self._top_k: Int32 = np.zeros(max_num_seqs, np.int32)  # 0: off
        self._top_p: Float32 = np.ones(max_num_seqs, np.float32)
        self._min_p: Float32 = np.zeros(max_num_seqs, np.float32)

    def enter(self, row: NewRow) -> bool:
        slot, params = row.slot, row.params
        self._top_k[slot] = params.top_k if 0 < params.top_k < self._vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        neutral = self._top_k[slot] == 0 and self._top_p[slot] == 1.0 and self._min_p[slot] == 0.0
        return not (neutral or self._greedy[slot])

    def apply(self, work: Work, rows: Rows, which: Int64) -> None:
        slots = rows.slots[which]
        columns = (work.tensor(column[slots]) for column in (self._top_k, self._top_p, self._min_p))
        work.put(which, ops.filter_logits(work.take(which), *columns))


def _ids(ids: Iterable[int], vocab_size: int) -> Int64:
    """The ids that the vocabulary has, each once."""
    return np.array(sorted({token for token in ids if 0 <= token < vocab_size}), np.int64)


def _parts(which: Int64, ids: list[Int64]) -> Iterator[tuple[Int64, list[Int64]]]:
    """The rows and their lists of ids in runs that hold about PART ids, or one longer list."""
    ends = np.cumsum([len(each) for each in ids], dtype=np.int64)
    cuts = [0, *(np.flatnonzero(np.diff(ends // PART)) + 1).tolist(), len(ids)]
    for first, last in pairwise(cuts):
        if first < last:
            yield which[first:last], ids[first:last]
