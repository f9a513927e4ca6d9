"""Takes hidden states out of forward passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokserve.base.errors import StartError
from tokserve.features.hidden_states.columns import NAME
from tokserve.features.hidden_states.options import HiddenStateOptions
from tokserve.models.decoder import Decoder
from tokserve.protocol.params import HiddenStateChoice, SamplingParams
from tokserve.protocol.plan import NewRow, StepPlan
from tokserve.runner.backend import FeatureRows
from tokserve.runner.features import RunnerContext, RunnerFeature


def make(context: RunnerContext) -> RunnerFeature | None:
    """None: the server returns none.  Raises StartError for a model whose layers are not this server's."""
    if not context.config.options_of(HiddenStateOptions).max_hidden_state_bytes:
        return None
    model = context.runner.model
    if model.implementation != Decoder.implementation:
        raise StartError(
            f"option max_hidden_state_bytes: hidden states are not available from a model of {model.implementation}"
        )
    return HiddenStateTaps(model)


@dataclass(slots=True)
class _Taken:
    """What is taken from a pass.  `rows` [n]: tokens of the batch.  `spans`: where each plan row's are among them."""

    rows: Tensor
    spans: dict[int, tuple[int, int, HiddenStateChoice]]
    layers: frozenset[int]
    states: dict[int, Tensor] = field(default_factory=dict)  # [n, H] by number of layers

    def tap(self, layers: int, states: Tensor) -> None:
        if layers in self.layers:
            self.states[layers] = states.index_select(0, self.rows)


class HiddenStateTaps(RunnerFeature):
    """Keeps what the requests in the slots have chosen, and takes it from each step that computes some of it."""

    def __init__(self, model: Decoder) -> None:
        self._num_layers, self._state_bytes = len(model.spec.blocks), model.spec.hidden * model.dtype.itemsize
        self._device = model.rope_table.device
        self._by_slot: dict[int, HiddenStateChoice] = {}
        self._taken: _Taken | None = None

    def on_start(self, facts: dict[str, Any]) -> None:
        facts |= {"hidden_layers": self._num_layers, "hidden_state_bytes": self._state_bytes}

    def assign(self, row: NewRow) -> None:
        self._by_slot.pop(row.slot, None)
        if isinstance(row.task, SamplingParams) and row.task.hidden_states is not None:
            self._by_slot[row.slot] = row.task.hidden_states

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def before(self, plan: StepPlan, model: Decoder) -> FeatureRows | None:
        self._taken = None
        if not self._by_slot:
            return None
        rows: list[int] = []
        spans: dict[int, tuple[int, int, HiddenStateChoice]] = {}
        begin = 0  # of the plan row in the batch
        columns = zip(plan.slots.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist(), strict=True)
        for index, (slot, computed, count) in enumerate(columns):
            chosen = self._by_slot.get(slot)
            if chosen is not None:
                rows_of_slot = [at - computed + begin for at in chosen.positions if computed <= at < computed + count]
                if rows_of_slot:
                    spans[index] = len(rows), len(rows) + len(rows_of_slot), chosen
                    rows += rows_of_slot
            begin += count
        if not rows:
            return None
        layers = frozenset(number for _, _, chosen in spans.values() for number in chosen.layers)
        self._taken = _Taken(torch.tensor(rows, device=self._device), spans, layers)
        return FeatureRows(tap=self._taken.tap)

    def values(self, plan: StepPlan) -> Mapping[str, dict[int, NDArray[Any]]]:
        taken, self._taken = self._taken, None
        if taken is None:
            return {}
        states = {number: _on_host(tensor) for number, tensor in taken.states.items()}
        values = {
            row: np.stack([states[number][first:last] for number in chosen.layers], axis=1)
            for row, (first, last, chosen) in taken.spans.items()
        }
        return {NAME: values}


def _on_host(states: Tensor) -> NDArray[Any]:
    """The values; of bfloat16, its bits."""
    states = states.cpu()
    array: NDArray[Any] = states.view(torch.uint16 if states.dtype is torch.bfloat16 else states.dtype).numpy()
    return array
