"""The budget of reasoning: a processor that ends a thought once it has so many tokens.

What a row may sample follows from its own tokens: where the markers of reasoning are in its output.  So it is the same
after drafts, preemption and in any batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import Int32, NewRow
from tokserve.runner.logits import LogitRows, LogitsBuffer
from tokserve.runner.processors import INF, Processor
from tokserve.runner.slots import Int64, Slots

Marker = tuple[int, ...]  # its ids; none: it is not looked for


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
