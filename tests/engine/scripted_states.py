"""Recurrent states of the scripted executor: a state is the hash of the tokens up to its position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokserve.protocol.kv_spec import StateLayout
from tokserve.protocol.plan import StepPlan


class IllegalPlan(AssertionError):
    """A plan that a device could not, or must not, execute."""


def demand(truth: object, message: str) -> None:
    if not truth:
        raise IllegalPlan(message)


class States:
    """The states of slots, and the snapshots.  Slots are the executor's, with the attributes `state` and `num_state`.

    `snapshots`: by id, the state, its position, and what made it.  `saved`: by step, those taken.  `restored`: requests
    that began with one.
    """

    def __init__(self, layout: StateLayout | None) -> None:
        self._layout = layout
        self.snapshots: dict[int, tuple[bytes, int, str]] = {}
        self.saved: dict[int, list[int]] = {}
        self.restored = 0

    def restore(self, slot: Any, weights: str) -> None:
        """A request takes a slot."""
        row = slot.row
        if row.snapshot < 0:
            demand(row.num_state == 0, f"{row.request_id}: has no state of position {row.num_state}")
            return
        state, position, made_by = self.snapshots[row.snapshot]
        demand(position == row.num_state, f"{row.request_id}: snapshot of {position}, not {row.num_state}")
        demand(state == slot.prefixes[position], f"{row.request_id}: a snapshot of other tokens")
        demand(made_by == weights, f"{row.request_id}: a snapshot that the weights {made_by!r} made")
        slot.state, slot.num_state = state, position
        self.restored += 1

    def advance(self, plan: StepPlan, slots: Mapping[int, Any], weights_of: Callable[[Any], str]) -> None:
        """A step is computed: states go on to the first draft of each row, and snapshots are taken on the way."""
        if self._layout is None:
            demand(not plan.saves, "snapshots of a model without states")
            return
        self.saved[plan.step] = saved = []
        demand(len({snapshot for _, _, snapshot in plan.saves}) == len(plan.saves), "a snapshot is taken twice")
        known = range(self._layout.snapshots)
        demand(all(snapshot in known for _, _, snapshot in plan.saves), "no such snapshot")
        columns = zip(plan.slots.tolist(), plan.num_tokens.tolist(), plan.num_drafts.tolist(), strict=True)
        for number, count, num_drafts in columns:
            slot = slots[number]
            name, start = slot.row.request_id, slot.computed - count
            demand(slot.state == slot.prefixes[slot.num_state], f"{name}: its state is of tokens that did not stay")
            demand(slot.num_state <= start + 1, f"{name}: its state of {slot.num_state} is past {start}")
            behind = start - slot.num_state
            demand(behind <= self._layout.spare_inputs, f"{name}: {slot.num_state} is too far behind {start}")
            before, slot.num_state = slot.num_state, max(slot.num_state, slot.computed - num_drafts)
            slot.state = slot.prefixes[slot.num_state]
            for owner, position, snapshot in plan.saves:
                if owner == number and before < position <= slot.num_state:
                    self.snapshots[snapshot] = (slot.prefixes[position], position, weights_of(slot))
                    saved.append(snapshot)
