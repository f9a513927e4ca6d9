"""The backend of the CPU: tables, KV memory and weights are the host's own, and work is done when a call returns."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.layers.batch import Pages
from tokserve.models.decoder import Decoder, DecoderSpec
from tokserve.protocol.kv_spec import LayerSpec
from tokserve.protocol.plan import Int32, StepPlan
from tokserve.runner import kvcache
from tokserve.runner.backend import WARM_UPS, Draft, FeatureRows, HiddenStates, decode_step
from tokserve.runner.cpu_graphs import CpuGraphs
from tokserve.runner.device import Device
from tokserve.runner.logits import LogitRows
from tokserve.runner.ranks import ONE, Ranks
from tokserve.runner.replay import Replay
from tokserve.runner.steps import PendingResult
from tokserve.runner.tables.host_slots import HostSlots
from tokserve.runner.tables.routed import RoutedTable
from tokserve.runner.tables.slots import SamplingColumns, last_indices
from tokserve.runner.tables.states import StateTable


class HostBackend:
    """Backend protocol, see `backend`."""

    warm_ups = WARM_UPS[:1]
    prompt_logits_bytes = 32 << 20
    keeps_memory = False

    def __init__(
        self,
        device: Device,
        specs: tuple[LayerSpec, ...],
        config: Config,
        max_model_len: int,
        spec: DecoderSpec,
        draft: Draft | None = None,
        ranks: Ranks = ONE,
    ) -> None:
        max_num_seqs = config.scheduler.rows
        self.device = device
        self.layout = kvcache.layout(
            specs,
            config.cache,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            free_bytes=max(0, device.free_memory()),
            most_drafts=config.speculation.resolved().num_drafts,
            agree=ranks.minimum,
        )
        self.slots = HostSlots(max_num_seqs, max_model_len, self.layout.block_size)
        self.kv: Pages = kvcache.allocate(self.layout)
        layout = self.layout
        self.states = None if layout.states is None else StateTable(layout, layout.states, self.kv)
        self.slots.states = self.states
        self.routed = RoutedTable(spec, self.layout) if config.model.enable_return_routed_experts else None
        self._eager = config.runtime.enforce_eager or ranks.size > 1  # what ranks do together is not captured
        self._graphs: Replay | None = None
        self.draft, self._draft_slots = draft, self.slots
        if draft is not None and draft.ahead:
            self._draft_slots = self.slots.shifted(draft.ahead)
        if draft is not None and self._draft_slots.states is not None:
            raise StartError(
                "speculative_config: a draft model is not supported with recurrent states, in either model"
            )
        self._draft_graphs: Replay | None = None

    def begin(self, plan: StepPlan, *, needs_history: bool) -> StepPlan:
        plan = self.slots.corrected(plan)
        if self.states is not None:
            self.states.begin(plan)
        return plan

    def replay(self, plan: StepPlan) -> Tensor | None:
        graphs = self._graphs
        return graphs.replay(plan) if graphs is not None and graphs.fits(plan) else None

    def forward(self, model: Decoder, plan: StepPlan, needed: Int32, features: FeatureRows | None) -> HiddenStates:
        batch = self.slots.build(plan, self.kv)
        if features is not None:
            features.put_into(batch)
        batch.routed = None if self.routed is None else []
        batch.logits_rows = self.slots.logits_rows(plan, batch, needed)
        states = model.forward(batch)
        if self.routed is not None and batch.routed is not None:
            self.routed.store(batch.slot_mapping, batch.routed)
        ends = np.add.accumulate(plan.num_tokens if batch.logits_rows is None else needed, dtype=np.int64)
        if np.add.reduce(plan.num_logits) == len(states):
            return HiddenStates(states, ends, None)
        return HiddenStates(states, ends, torch.from_numpy(last_indices(ends, plan.num_logits)))

    def draft_logits(self, plan: StepPlan) -> Tensor:
        draft, graphs, rows = self.draft, self._draft_graphs, len(plan.slots)
        assert draft is not None
        total = int(np.add.reduce(plan.num_tokens))
        if graphs is not None and total <= 2 * rows and plan.num_logits.all():
            # as a row with a draft: the head's work on a few rows more costs less than a step that is not captured
            every = replace(plan, num_logits=plan.num_tokens, draft_token_ids=np.zeros(total - rows, np.int32))
            if graphs.fits(every):
                logits = graphs.replay(every)
                last = np.add.accumulate(plan.num_tokens, dtype=np.int64) - 1
                return logits if total == rows else logits.index_select(0, torch.from_numpy(last))
        batch = self._draft_slots.build(plan, self.kv[draft.first_layer :])
        batch.logits_rows = self._draft_slots.logits_rows(plan, batch, plan.num_logits)
        return draft.model.logits(draft.model.forward(batch))

    def columns(self, rows: LogitRows) -> SamplingColumns:
        return self.slots.columns(rows.slots, rows.lengths)

    def finish(self, result: PendingResult, columns: SamplingColumns, token_ids: Tensor) -> None:
        slots, lengths, tokens = result.new_tokens()
        self.slots.tokens[slots, lengths] = tokens
        if len(result.plan.draft_token_ids):
            self.slots.limit_computed(*result.computed_after_drafts())

    def is_batch_invariant(self, model: Decoder) -> bool:
        return True

    def capture(self, model: Decoder) -> None:
        if not self._eager:
            self._graphs = CpuGraphs(self.slots, self.kv, decode_step(model), model.row_bytes(), self.routed)
            if self.draft is not None:
                second, kv = self.draft.model, self.kv[self.draft.first_layer :]
                self._draft_graphs = CpuGraphs(self._draft_slots, kv, decode_step(second), second.row_bytes())

    def invalidate(self) -> None:
        self._graphs = self._draft_graphs = None

    def on_foreign_code(self, model: Decoder) -> None:
        if self._graphs is not None:
            self._graphs.invalidate()

    def allocate_kv(self) -> None:
        self.kv = kvcache.allocate(self.layout)
        if self.states is not None:
            self.states.kv = self.kv

    def release_kv(self) -> None:
        self.kv = []
        if self.states is not None:
            self.states.kv = self.kv
