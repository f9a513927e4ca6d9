"""The recurrent states of the requests in slots: to which position each belongs, and snapshots of them.

A state is a row of the layers' tensors: the first rows are the slots', the others snapshots.  It includes the tokens up
to the first whose successor was sampled, never a draft: how many drafts stay is known only when the step is over, and
the next step takes those that did from the rings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tokserve.layers.batch import Pages, StateRows
from tokserve.protocol.kv_spec import KVLayout, StateLayout, StateSpec
from tokserve.protocol.plan import Int32, NewRow, StepPlan
from tokserve.runner.tables.slots import Int64

PAIR = 3  # numbers of an entry of `saves`


@dataclass(frozen=True, slots=True)
class StateColumns:
    """`StateRows` on the host, for the rows of one plan."""

    rows: Int64
    start: Int32
    end: Int32
    saves: Int32


class StateTable:
    """`step` has the columns of the plan that was begun last, `saved` the snapshots that it takes."""

    def __init__(self, layout: KVLayout, states: StateLayout, kv: Pages) -> None:
        self.kv = kv
        self.saved: list[int] = []
        self._specs, self._slots = layout.specs, states.slots
        self._positions: Int32 = np.zeros(states.slots, np.int32)
        self.step = StateColumns(*(np.zeros(0, np.int64), *(np.zeros(0, np.int32),) * 2, np.zeros((0, PAIR), np.int32)))

    def assign(self, row: NewRow) -> None:
        """A request takes a slot, with the state of a snapshot or none."""
        self._positions[row.slot] = row.num_state
        if row.snapshot >= 0:
            for spec, tensors in zip(self._specs, self.kv, strict=True):
                for tensor in tensors if isinstance(spec, StateSpec) else ():
                    tensor[row.slot].copy_(tensor[self._slots + row.snapshot])

    def begin(self, plan: StepPlan) -> None:
        """The plan, whose `num_computed` is true, is computed next."""
        start = self._positions[plan.slots]
        end: Int32 = np.maximum(start, plan.num_computed + plan.num_tokens - plan.num_drafts).astype(np.int32)
        self._positions[plan.slots] = end
        saves, self.saved = np.zeros((0, PAIR), np.int32), []
        if plan.saves:
            row_of = {slot: row for row, slot in enumerate(plan.slots.tolist())}
            taken = [
                (row_of[slot], position, snapshot)
                for slot, position, snapshot in plan.saves
                if start[row_of[slot]] < position <= end[row_of[slot]]
            ]
            self.saved = [snapshot for _, _, snapshot in taken]
            entries = sorted((row, position, self._slots + snapshot) for row, position, snapshot in taken)
            saves = np.array(entries, np.int32).reshape(-1, PAIR)
        self.step = StateColumns(plan.slots.astype(np.int64), start, end, saves)

    def rows(self) -> StateRows:
        """The columns of the step as tensors."""
        step = self.step
        return StateRows(
            torch.from_numpy(step.rows),
            torch.from_numpy(step.start),
            torch.from_numpy(step.end),
            torch.from_numpy(step.saves),
        )

    def fill(self, into: StateColumns) -> None:
        """The columns of the step into arrays with at least as many rows and entries."""
        step, rows, saves = self.step, len(self.step.rows), len(self.step.saves)
        into.rows[:rows], into.start[:rows], into.end[:rows] = step.rows, step.start, step.end
        into.saves[:saves] = step.saves
        into.saves[saves:] = -1


def blank_columns(rows: int) -> tuple[StateColumns, StateRows]:
    """Arrays of so many rows, and the same memory as tensors."""
    columns = StateColumns(
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int32),
        np.zeros(rows, np.int32),
        np.full((rows, PAIR), -1, np.int32),
    )
    return columns, StateRows(
        torch.from_numpy(columns.rows),
        torch.from_numpy(columns.start),
        torch.from_numpy(columns.end),
        torch.from_numpy(columns.saves),
    )
