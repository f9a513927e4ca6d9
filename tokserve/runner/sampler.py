"""From logits to tokens and logprobs, for drawn tokens and for prompt tokens alike.

Draws are keyed by (request seed, index of the new token), so nothing is remembered between steps.  Kinds
of logprob: raw (log softmax of the model's logits), temperature (of logits / T; a greedy request counts
as T = 1), processed (of what the token was drawn from; for a greedy request, what the arg-max was taken of).
A row with nothing to draw from is flagged and replaced by zeros before anything else looks at it, so it
cannot touch the other rows.  Knows nothing of plans, models or the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve import ops
from tokserve.device import Device, Fetched, Host
from tokserve.params import LOGPROBS_MODES, LogprobsMode
from tokserve.plan import Int32, LogprobRows, Masks, NewRow
from tokserve.runner.logits import INF, Pipeline, Rows
from tokserve.runner.slots import Int64, Slots

_NONE = -1
_KINDS = len(LOGPROBS_MODES)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A new token per row."""

    token_ids: Int32  # [n]
    finite: NDArray[np.bool_]  # [n]; False: there was nothing to draw from, the id means nothing
    logprobs: LogprobRows | None
    forbidden: NDArray[np.bool_] | None = None  # [n]; those of them that the request's own parameters left nothing


@dataclass(frozen=True, slots=True)
class Drawing:
    """New tokens that may still be on their way to the host: the ids, and what comes with them or is known."""

    token_ids: Tensor  # [n] int64, where the logits are
    fetched: Fetched  # ids; and unless `known`: finite, and the columns of `LogprobRows` if there are any
    known: tuple[NDArray[np.bool_], LogprobRows | None, NDArray[np.bool_] | None] | None = None

    def result(self) -> Drawn:
        """Waits for them."""
        token_ids, *rest = self.fetched.arrays()
        if self.known is not None:
            return Drawn(token_ids.astype(np.int32), *self.known)
        return Drawn(token_ids.astype(np.int32), rest[0], LogprobRows(*rest[1:]) if len(rest) > 1 else None)


class Sampler:
    """The processors, and what logprobs each slot asks for."""

    def __init__(self, slots: Slots, vocab_size: int, mode: LogprobsMode, device: Device | None = None) -> None:
        max_num_seqs = len(slots.seeds)
        self._slots = slots
        self._device = device or Host()
        self._vocab_size = vocab_size
        self._mode = mode  # of requests that do not say
        self._pipeline = Pipeline(slots, vocab_size)
        self._kind: Int64 = np.zeros(max_num_seqs, np.int64)  # index into LOGPROBS_MODES
        self._form: Int64 = np.full(max_num_seqs, _NONE, np.int64)  # (kind, k, named ids) as one number
        self._asking: set[int] = set()  # slots with a form
        self._named: dict[int, Int64] = {}
        self._prompt_k: Int64 = np.full(max_num_seqs, _NONE, np.int64)
        self._prompt_start: Int64 = np.zeros(max_num_seqs, np.int64)
        self._scoring: set[int] = set()  # slots with a prompt_k

    def enter(self, row: NewRow) -> None:
        """A request takes a slot, after `Slots.enter`."""
        slot, params = row.slot, row.params
        self.leave(slot)
        self._pipeline.enter(row)
        kind = LOGPROBS_MODES.index(params.logprobs_mode or self._mode)
        named = params.logprob_token_ids or []
        self._named[slot] = np.array(named, np.int64)
        self._kind[slot] = kind
        if params.logprobs is not None or named:
            self._form[slot] = (len(named) * (self._vocab_size + 1) + self._top(params.logprobs or 0)) * _KINDS + kind
            self._asking.add(slot)
        if params.prompt_logprobs is not None:
            self._prompt_k[slot] = self._top(params.prompt_logprobs)
            self._prompt_start[slot] = params.prompt_logprobs_start
            self._scoring.add(slot)

    def leave(self, slot: int) -> None:
        """The slot is free."""
        self._pipeline.leave(slot)
        self._form[slot] = self._prompt_k[slot] = _NONE
        self._asking.discard(slot)
        self._scoring.discard(slot)

    def _top(self, asked: int) -> int:
        return self._vocab_size if asked < 0 else min(asked, self._vocab_size)

    def looks_back(self, slots: Int32) -> bool:
        """Whether the tokens so far of any of these slots must be in the host's table."""
        return self._pipeline.looks_back(slots)

    def draw(self, logits: Tensor, rows: Rows, masks: Masks | None = None) -> Drawn:
        """As `begin`, and waits for the result."""
        return self.begin(logits, rows, masks).result()

    def begin(self, logits: Tensor, rows: Rows, masks: Masks | None = None) -> Drawing:
        """New tokens from the model's logits [n, V] float32, which are the sampler's to change.  `masks`: of the rows
        that have a grammar."""
        self._pipeline.grammar.step = masks
        form, needs = self._shared_form(rows), self._pipeline.needs(rows)
        if form is not None and needs in (0, self._pipeline.scaling):
            mode = LOGPROBS_MODES[form % _KINDS]
            if not (needs and form != _NONE and mode == "processed"):  # its ranks are those of what was divided
                return self._draw_at_once(logits, rows, form, scaling=needs != 0)
        finite = np.isfinite(logits.amax(1).cpu().numpy())
        if np.count_nonzero(finite) < len(finite):
            logits[self._tensor(~finite)] = 0.0
        work, drawable = self._pipeline.run(logits, rows)
        forbidden = None
        if drawable is not None and not drawable.all():
            work[self._tensor(~drawable)] = 0.0
            forbidden = finite & ~drawable
            finite &= drawable
        columns = self._slots.columns(rows.slots, rows.lengths)
        token_ids = ops.sample(work, columns.seeds, columns.lengths, columns.greedy)  # [n] int64
        logprobs = self._drawn_logprobs(logits, work, rows, token_ids) if self._asking else None
        return Drawing(token_ids, self._device.fetch([token_ids]), (finite, logprobs, forbidden))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device.torch_device)

    def _shared_form(self, rows: Rows) -> int | None:
        """What logprobs all rows ask for, if it is the same for all and no ids are named."""
        if not self._asking:
            return _NONE
        form, *others = set(self._form[rows.slots].tolist())
        return form if not others and form < (self._vocab_size + 1) * _KINDS else None

    def _draw_at_once(self, logits: Tensor, rows: Rows, form: int, *, scaling: bool) -> Drawing:
        """For rows that need a temperature at most, and logprobs of one form."""
        k, kind = (-1, 0) if form == _NONE else divmod(form, _KINDS)
        columns = self._slots.columns(rows.slots, rows.lengths)
        drawn = ops.sample_fused(
            logits, columns.seeds, columns.lengths, columns.greedy, columns.temperature if scaling else None,
            LOGPROBS_MODES[kind] == "temperature", k,
        )  # fmt: skip
        return Drawing(drawn[0], self._device.fetch(drawn if k >= 0 else drawn[:2]))

    def _drawn_logprobs(self, logits: Tensor, work: Tensor, rows: Rows, token_ids: Tensor) -> LogprobRows | None:
        """Rows that ask for the same form go through the op together, each form by itself."""
        forms = self._form[rows.slots]
        if (forms == forms[0]).all():
            return None if forms[0] == _NONE else self._form_logprobs(int(forms[0]), logits, work, rows, token_ids)
        parts: list[tuple[Int64, LogprobRows]] = []
        for form in np.unique(forms[forms != _NONE]).tolist():
            which = np.flatnonzero(forms == form)
            index = self._tensor(which)
            source = work if LOGPROBS_MODES[form % _KINDS] == "processed" else logits
            part = source.index_select(0, index)
            mine = Rows(rows.slots[which], rows.lengths[which], rows.prompt_lens[which])
            parts.append((which, self._form_logprobs(form, part, part, mine, token_ids.index_select(0, index))))
        return _scatter(len(forms), parts)

    def _form_logprobs(self, form: int, logits: Tensor, work: Tensor, rows: Rows, token_ids: Tensor) -> LogprobRows:
        rest, kind = divmod(form, _KINDS)
        num_named, k = divmod(rest, self._vocab_size + 1)
        named = None
        if num_named:
            named = self._tensor(np.stack([self._named[slot] for slot in rows.slots.tolist()]))
        return self._logprobs(kind, k, named, logits, work, rows, token_ids)

    def _logprobs(
        self, kind: int, k: int, named: Tensor | None, logits: Tensor, work: Tensor, rows: Rows, token_ids: Tensor
    ) -> LogprobRows:
        mode = LOGPROBS_MODES[kind]
        temperature = None
        if mode == "temperature":
            temperature = self._tensor(self._slots.temperature[rows.slots])
        columns = ops.logprobs(work if mode == "processed" else logits, token_ids, k, named, temperature)
        return LogprobRows(*(column.cpu().numpy() for column in columns))

    @property
    def scoring(self) -> bool:
        """Whether any request wants logprobs of its prompt."""
        return bool(self._scoring)

    def scored_rows(self, slots: Int32) -> Int64:
        """Which rows want logprobs of their prompt tokens."""
        return np.flatnonzero(self._prompt_k[slots] != _NONE)

    def scored_range(self, slot: int, start: int, end: int) -> tuple[int, int]:
        """Indices [first, last) of the prompt tokens to score, of those that positions start .. end - 1 predict."""
        first = max(int(self._prompt_start[slot]), start + 1)
        return first, min(int(self._slots.prompt_lens[slot]), end + 1)

    def score(self, logits: Tensor, slot: int, first: int) -> LogprobRows:
        """Logprobs of the slot's prompt tokens first, first + 1, .. from the logits [n, V] that predict them."""
        count = logits.shape[0]
        lengths = np.arange(first, first + count, dtype=np.int64)
        rows = Rows(np.full(count, slot, np.int32), lengths, lengths, drawing=False)
        token_ids = self._tensor(self._slots.tokens[slot, first : first + count].astype(np.int64))
        kind, k = int(self._kind[slot]), int(self._prompt_k[slot])
        work, drawable = logits, None
        if LOGPROBS_MODES[kind] == "processed":
            work, drawable = self._pipeline.run(logits, rows)
        found = self._logprobs(kind, k, None, logits, work, rows, token_ids)
        if drawable is not None and not drawable.all():  # everything was forbidden there
            found.token_logprobs[~drawable] = -INF
            found.top_logprobs[~drawable] = -INF
        return found


def join(parts: list[LogprobRows]) -> LogprobRows:
    """Rows of equal width one after the other."""
    if len(parts) == 1:
        return parts[0]
    return LogprobRows(
        np.concatenate([part.token_logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )


def _scatter(count: int, parts: list[tuple[Int64, LogprobRows]]) -> LogprobRows:
    """Rows of different widths in their places; the rest is zeros."""
    width = max(part.top_ids.shape[1] for _, part in parts)
    out = LogprobRows(
        np.zeros(count, np.float32), np.zeros(count, np.int32),
        np.zeros((count, width), np.int32), np.zeros((count, width), np.float32),
    )  # fmt: skip
    for which, part in parts:
        own = part.top_ids.shape[1]
        out.token_logprobs[which], out.ranks[which] = part.token_logprobs, part.ranks
        out.top_ids[which, :own], out.top_logprobs[which, :own] = part.top_ids, part.top_logprobs
    return out
