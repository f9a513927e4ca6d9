"""From logits to tokens and logprobs, for sampled tokens and for prompt tokens alike.

Randomness is keyed by (request seed, index of the new token), so nothing is remembered between steps.  Kinds of
logprob: raw (log softmax of the model's logits), temperature (of logits / T; a greedy request counts as T = 1),
processed (of what the token was sampled from; for a greedy request, what the arg-max was taken of).  A row without a
token to sample is flagged and replaced by zeros before anything else reads it, so it cannot touch the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve import ops
from tokserve.protocol.candidates import NO_CANDIDATE, candidate_rows
from tokserve.protocol.columns import LOGPROBS, ColumnRows
from tokserve.protocol.logprobs import logprob_records
from tokserve.protocol.params import LOGPROBS_MODES, LogprobsMode, SamplingParams
from tokserve.protocol.plan import NO_LEGAL_TOKEN, NOT_FINITE, OK, GrammarBitmask, Int32, NewRow, UInt8
from tokserve.runner.columns import Columns, SampledLogits, TokenSource
from tokserve.runner.device import Accelerator, Device, Fetched
from tokserve.runner.logits import LogitRows
from tokserve.runner.pipeline import Pipeline
from tokserve.runner.tables.slots import Int64, SamplingColumns, Slots

_NONE = -1
_KINDS = len(LOGPROBS_MODES)
Logprobs = tuple[Tensor, Tensor, Tensor, Tensor]  # as `logprob_records` takes them, on the device


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A new token per row of logits.  `columns`: by name, those that a row asked for."""

    token_ids: Int32  # [n]
    status: UInt8 | None  # [n], unless OK the row's id means nothing; None: all are OK
    columns: dict[str, ColumnRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingSample:
    """New tokens that may still be on their way to the host."""

    token_ids: Tensor  # [n] int64, on the device
    # ids, finite [n], with `has_legal` legal [n], then the arrays of each of `sources`, and four of each of `parts`
    fetched: Fetched
    parts: tuple[Int64 | None, ...] = ()  # of the logprobs: their rows, None for all
    has_legal: bool = False
    sources: tuple[tuple[str, TokenSource, Int64], ...] = ()  # columns besides logprobs: name, source, rows that asked
    flags: tuple[Tensor, ...] = ()  # [n] bool on the device: finite, and with `has_legal` legal

    def result(self) -> SampledTokens:
        """Wait for them."""
        token_ids, finite, *rest = self.fetched.arrays()
        status = None
        if self.has_legal:
            legal = rest.pop(0)
            if np.count_nonzero(legal) < len(legal):
                status = np.where(legal, np.uint8(OK), np.uint8(NO_LEGAL_TOKEN))
        if np.count_nonzero(finite) < len(finite):
            status = np.where(finite, np.uint8(OK) if status is None else status, np.uint8(NOT_FINITE))
        columns = {}
        for name, source, index in self.sources:
            columns[name] = source.rows(rest[: source.num_arrays], len(token_ids), index)
            rest = rest[source.num_arrays :]
        if self.parts:
            columns[LOGPROBS] = ColumnRows(self._logprobs(rest))
        return SampledTokens(token_ids.astype(np.int32), status, columns)

    def _logprobs(self, arrays: list[NDArray[Any]]) -> Int32:
        """Records of all tokens, of those of the parts; rows of no part are zeros."""
        records = [logprob_records(*arrays[first : first + 4]) for first in range(0, len(arrays), 4)]
        if self.parts[0] is None:
            return records[0]
        longest = max(part.shape[1] for part in records)
        joined = np.zeros((len(self.token_ids), longest), np.int32)
        for index, part in zip(self.parts, records, strict=True):
            joined[index, : part.shape[1]] = part
        return joined


class Sampler:
    """The processors, and the logprobs and other columns that each slot's request asks for.  `max_mask`: most ids of a
    sampling mask."""

    def __init__(
        self, slots: Slots, vocab_size: int, mode: LogprobsMode, device: Device, *, max_mask: int = 1024
    ) -> None:
        max_num_seqs = len(slots.seeds)
        self._slots = slots
        self._device = device
        self._vocab_size = vocab_size
        self._mode = mode  # of requests that do not say
        self._is_late = isinstance(device, Accelerator)  # what the device computes is not read before the next step
        self._pipeline = Pipeline(slots, vocab_size, self._tensor)
        self._kind: Int64 = np.zeros(max_num_seqs, np.int64)  # index into LOGPROBS_MODES
        self._form: Int64 = np.full(max_num_seqs, _NONE, np.int64)  # (kind, k, named ids) as one number
        self._with_form: set[int] = set()  # slots
        self._named: dict[int, Int64] = {}
        self._prompt_k: Int64 = np.full(max_num_seqs, _NONE, np.int64)
        self._prompt_start: Int64 = np.zeros(max_num_seqs, np.int64)
        self._prompt_kind: Int64 = np.zeros(max_num_seqs, np.int64)  # as `_kind`
        self._with_prompt_k: set[int] = set()  # slots
        self._candidates: dict[int, Int32] = {}  # by slot, of prompt tokens
        self._columns = Columns(max_num_seqs, min(max_mask, vocab_size))

    def assign(self, row: NewRow) -> None:
        """A request takes a slot, after `Slots.assign`."""
        slot, params = row.slot, row.task
        self.release(slot)
        if not isinstance(params, SamplingParams):
            return
        self._pipeline.assign(row, params)
        kind = LOGPROBS_MODES.index(params.logprobs_mode or self._mode)
        named = params.logprob_token_ids or []
        self._named[slot] = np.array(named, np.int64)
        self._kind[slot] = kind
        if params.logprobs is not None or named:
            self._form[slot] = (len(named) * (self._vocab_size + 1) + self._top(params.logprobs or 0)) * _KINDS + kind
            self._with_form.add(slot)
        if params.prompt_logprobs is not None:
            self._prompt_k[slot] = self._top(params.prompt_logprobs)
            self._prompt_start[slot] = params.prompt_logprobs_start
            mode = params.prompt_logprobs_mode or params.logprobs_mode or self._mode
            self._prompt_kind[slot] = LOGPROBS_MODES.index(mode)
            self._with_prompt_k.add(slot)
        if params.prompt_logprob_token_ids is not None:
            self._candidates[slot] = candidate_rows(params.prompt_logprob_token_ids)
        self._columns.assign(row)

    def release(self, slot: int) -> None:
        self._pipeline.release(slot)
        self._form[slot] = self._prompt_k[slot] = _NONE
        self._with_form.discard(slot)
        self._with_prompt_k.discard(slot)
        self._candidates.pop(slot, None)
        self._columns.release(slot)

    def _top(self, k: int) -> int:
        return self._vocab_size if k < 0 else min(k, self._vocab_size)

    def sample(
        self, logits: Tensor, rows: LogitRows, columns: SamplingColumns, bitmask: GrammarBitmask | None = None
    ) -> PendingSample:
        """New tokens from the model's logits [n, V] float32, which the sampler may change.  `bitmask`: of the rows with
        a grammar."""
        self._pipeline.set_bitmask(bitmask)
        form, needs = self._shared_form(rows), self._pipeline.needs(rows)
        rows_by_column = self._columns.asked(rows.slots)
        if form is not None and not rows_by_column:
            mode = LOGPROBS_MODES[form % _KINDS]
            if not (needs and form != _NONE and mode == "processed"):  # its ranks are those of what was divided
                if needs in (0, self._pipeline.temperature_bit):
                    return self._sample_fused(logits, columns, form, scaling=needs != 0)
                if self._are_few(rows, columns, needs):
                    return self._sample_fused(logits, columns, form, scaling=True, few=True)
        flags = [logits.amax(1).isfinite()]
        self._clear(logits, ~flags[0])
        processed, legal = self._processed(logits, rows, columns, needs)
        if legal is not None:
            self._clear(processed, ~legal)
            flags.append(legal)
        token_ids = ops.sample(processed, columns.seeds, columns.lengths, columns.greedy)  # [n] int64
        parts = self._sampled_logprobs(logits, processed, rows, columns, token_ids) if self._with_form else []
        sources = tuple([(name, self._columns.source(name), index) for name, index in rows_by_column.items()])
        values: list[Tensor] = []
        if sources:
            sampled = SampledLogits(logits, processed, token_ids, columns.greedy, columns.temperature)
            for _, source, index in sources:
                values += source.compute(sampled if len(index) == len(logits) else sampled.take(self._tensor(index)))
        fetched = self._device.fetch([token_ids, *flags, *values, *(column for _, part in parts for column in part)])
        logprobs_rows = tuple(index for index, _ in parts)
        return PendingSample(token_ids, fetched, logprobs_rows, legal is not None, sources, tuple(flags))

    def _clear(self, logits: Tensor, rows: Tensor) -> None:
        """Zeros in place of these rows [n] bool, which there hardly ever are."""
        if self._is_late:
            logits.masked_fill_(rows[:, None], 0.0)
        elif rows.any():
            logits[rows] = 0.0

    def _processed(
        self, logits: Tensor, rows: LogitRows, columns: SamplingColumns, needs: int
    ) -> tuple[Tensor, Tensor | None]:
        """The logits after `Pipeline.run`, or, where the step's columns hold all that is needed, after these alone."""
        if columns.filters is None or not self._needs_columns_only(needs):
            return self._pipeline.run(logits, rows)
        top_k, top_p, min_p = columns.filters
        few = self._pipeline.filters.few(rows.slots)
        return ops.filter_logits(logits / columns.temperature[:, None], top_k, top_p, min_p, few), None

    def _needs_columns_only(self, needs: int) -> bool:
        return needs != 0 and not needs & ~self._pipeline.column_bits

    def _are_few(self, rows: LogitRows, columns: SamplingColumns, needs: int) -> bool:
        """Whether all rows are sampled by one op, which draws from the few ids that a top-k leaves."""
        fits = columns.filters is not None and self._needs_columns_only(needs)
        return fits and ops.is_sampling_of_few_fused() and self._pipeline.filters.all_few(rows.slots)

    def draw(self, logits: Tensor, rows: LogitRows, columns: SamplingColumns) -> Int32:
        """Drafts [n] from a draft model's logits [n, V], with the noise and the parameters of the rows' requests.
        Where nothing may be sampled, any id is drawn."""
        needs = self._pipeline.needs(rows)
        if needs in (0, self._pipeline.temperature_bit):
            pending = self._sample_fused(logits, columns, _NONE, scaling=needs != 0)
            return pending.result().token_ids
        finite = torch.isfinite(logits.amax(1, keepdim=True))
        processed, legal = self._processed(logits.where(finite, 0.0), rows, columns, needs)
        if legal is not None:
            self._clear(processed, ~legal)
        token_ids = ops.sample(processed, columns.seeds, columns.lengths, columns.greedy)
        return self._device.fetch([token_ids]).arrays()[0].astype(np.int32)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        if isinstance(self._device, Accelerator):
            return self._device.put([array])[0]
        return torch.from_numpy(array)

    def _shared_form(self, rows: LogitRows) -> int | None:
        """The form of logprobs of all rows, if it is the same for all and names no ids."""
        if not self._with_form:
            return _NONE
        form, *others = set(self._form[rows.slots].tolist())
        return form if not others and form < (self._vocab_size + 1) * _KINDS else None

    def _sample_fused(
        self, logits: Tensor, columns: SamplingColumns, form: int, *, scaling: bool, few: bool = False
    ) -> PendingSample:
        """Sample rows that need a temperature at most, or of which a top-k leaves a `few` ids, and logprobs of one
        form."""
        k, kind = (-1, 0) if form == _NONE else divmod(form, _KINDS)
        scaled = LOGPROBS_MODES[kind] == "temperature"
        noise = (columns.seeds, columns.lengths, columns.greedy)
        if few:
            assert columns.filters is not None
            top_k, top_p, min_p = columns.filters
            sampled = ops.sample_few(logits, *noise, columns.temperature, top_k, top_p, min_p, scaled, k)
        else:
            sampled = ops.sample_fused(logits, *noise, columns.temperature if scaling else None, scaled, k)
        if k < 0:
            return PendingSample(sampled[0], self._device.fetch(sampled[:2]), flags=(sampled[1],))
        return PendingSample(sampled[0], self._device.fetch(sampled), parts=(None,), flags=(sampled[1],))

    def _sampled_logprobs(
        self, logits: Tensor, processed: Tensor, rows: LogitRows, columns: SamplingColumns, token_ids: Tensor
    ) -> list[tuple[Int64 | None, Logprobs]]:
        """Rows of the same form go through the op together, each form by itself: the rows (None: all), and theirs."""
        forms, temperature = self._form[rows.slots], columns.temperature
        if (forms == forms[0]).all():
            inputs = (logits, processed, rows, temperature, token_ids)
            return [] if forms[0] == _NONE else [(None, self._form_logprobs(int(forms[0]), *inputs))]
        parts: list[tuple[Int64 | None, Logprobs]] = []
        for form in np.unique(forms[forms != _NONE]).tolist():
            index = np.flatnonzero(forms == form)
            on_device = self._tensor(index)
            source = processed if LOGPROBS_MODES[form % _KINDS] == "processed" else logits
            part, *rest = (column.index_select(0, on_device) for column in (source, temperature, token_ids))
            parts.append((index, self._form_logprobs(form, part, part, rows.take(index), *rest)))
        return parts

    def _form_logprobs(
        self, form: int, logits: Tensor, processed: Tensor, rows: LogitRows, temperature: Tensor, token_ids: Tensor
    ) -> Logprobs:
        rest, kind = divmod(form, _KINDS)
        num_named, k = divmod(rest, self._vocab_size + 1)
        named = None
        if num_named:
            named = self._tensor(np.stack([self._named[slot] for slot in rows.slots.tolist()]))
        return self._logprobs(kind, k, named, logits, processed, temperature, token_ids)

    def _logprobs(
        self,
        kind: int,
        k: int,
        named: Tensor | None,
        logits: Tensor,
        processed: Tensor,
        temperature: Tensor,
        token_ids: Tensor,
    ) -> Logprobs:
        mode = LOGPROBS_MODES[kind]
        divisor = temperature if mode == "temperature" else None
        return ops.logprobs(processed if mode == "processed" else logits, token_ids, k, named, divisor)

    def _candidate_logprobs(
        self, kind: int, candidates: Int32, logits: Tensor, temperature: Tensor, token_ids: Tensor
    ) -> Logprobs:
        """Logprobs whose alternatives are the candidates [n, K] and, last, all other ids together.  Changes the logits.

        In place of NO_CANDIDATE another of the row is read, or id 0.
        """
        divisor = temperature if LOGPROBS_MODES[kind] == "temperature" else None
        filled = np.where(candidates == NO_CANDIDATE, candidates.max(1, keepdims=True, initial=0), candidates)
        ids = self._tensor(filled.astype(np.int64))
        values = logits.gather(1, ids)
        zeros, greedy = torch.zeros_like(token_ids), torch.ones_like(token_ids, dtype=torch.bool)
        best = ops.sample(logits.scatter_(1, ids, -torch.inf), zeros, zeros, greedy)[:, None]  # of the others
        is_left = logits.gather(1, best)[:, 0] > -torch.inf
        logits.scatter_(1, ids, values)
        token_logprobs, ranks, top_ids, top_logprobs = ops.logprobs(
            logits, token_ids, 0, torch.cat([ids, best], 1), divisor
        )
        among_others = ops.logprobs(logits.scatter_(1, ids, -torch.inf), best[:, 0], 0, None, divisor)[0]
        mass = (top_logprobs[:, -1] - among_others).clamp_(max=0.0)
        top_logprobs[:, -1] = mass.where(is_left, -torch.inf)
        return token_logprobs, ranks, top_ids, top_logprobs

    def scored_spans(self, slots: Int32, starts: Int32, counts: Int32) -> list[tuple[int, int, int]]:
        """(row, first, last): the prompt tokens first .. last - 1 to score, of those that the row's positions predict.
        Row i computes counts[i] positions from starts[i] on."""
        if not self._with_prompt_k:
            return []
        spans = []
        for row in np.flatnonzero(self._prompt_k[slots] != _NONE).tolist():
            slot, start = int(slots[row]), int(starts[row])
            first = max(int(self._prompt_start[slot]), start + 1)
            last = min(int(self._slots.prompt_lens[slot]), start + int(counts[row]) + 1)
            if first < last:
                spans.append((row, first, last))
        return spans

    def score(self, logits: Tensor, slot: int, first: int) -> Int32:
        """Records of the logprobs of the slot's prompt tokens first, first + 1, .. from the logits [n, V] that predict
        them."""
        count = logits.shape[0]
        lengths = np.arange(first, first + count, dtype=np.int64)
        rows = LogitRows(np.full(count, slot, np.int32), lengths, lengths, sampling=False)
        token_ids = self._tensor(self._slots.tokens[slot, first : first + count].astype(np.int64))
        kind, k = int(self._prompt_kind[slot]), int(self._prompt_k[slot])
        processed, legal = logits, None
        if LOGPROBS_MODES[kind] == "processed":
            processed, legal = self._pipeline.run(logits, rows)
        temperature = self._tensor(self._slots.temperature[rows.slots])
        candidates = self._candidates.get(slot)
        if candidates is None:
            columns = self._logprobs(kind, k, None, logits, processed, temperature, token_ids)
        else:
            at = first - int(self._prompt_start[slot])
            candidates = (
                np.broadcast_to(candidates, (count, len(candidates)))
                if candidates.ndim == 1
                else candidates[at : at + count]
            )
            columns = self._candidate_logprobs(kind, candidates, processed, temperature, token_ids)
        arrays = self._device.fetch([*columns, *([] if legal is None else [legal])]).arrays()
        token_logprobs, ranks, top_ids, top_logprobs = arrays[:4]
        for allowed in arrays[4:]:  # elsewhere every id was forbidden
            token_logprobs[~allowed] = -np.inf
            top_logprobs[~allowed] = -np.inf
        if candidates is not None:
            top_ids[:, :-1], top_ids[:, -1] = candidates, NO_CANDIDATE
            top_logprobs[:, :-1][candidates == NO_CANDIDATE] = -np.inf
            top_logprobs[(candidates == NO_CANDIDATE).all(1), -1] = 0.0
        return logprob_records(token_logprobs, ranks, top_ids, top_logprobs)
