"""One model on one device: turns each `StepPlan` into a `StepResult`, in a forward pass and a sampling.

It has no policy: which requests run, which are preempted and when a request ends, the engine decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokserve.base.errors import NotFound
from tokserve.base.trace import Spans
from tokserve.config import Config
from tokserve.models.decoder import Decoder
from tokserve.protocol.columns import PROMPT_LOGPROBS, Int32
from tokserve.protocol.plan import DRAWN, GrammarBitmask, StepPlan, StepResult
from tokserve.runner.admin import Admin
from tokserve.runner.backend import Backend, HiddenStates
from tokserve.runner.features import Calls, RunnerFeature, RunnerHooks
from tokserve.runner.logits import LogitRows
from tokserve.runner.ranks import ONE, AwaitedTokens, Ranks
from tokserve.runner.sampler import PendingSample, Sampler
from tokserve.runner.steps import PendingResult, PendingStep
from tokserve.runner.tables.slots import SamplingColumns, logit_lengths

Span = tuple[int, int, int]  # plan row, first and last (exclusive) prompt token to score


class Runner:
    """`forward` and `sample` alternate for every plan, in order, in one thread, which also makes the calls;
    `background` runs in another one, and `copy` in those of lanes."""

    def __init__(self, model: Decoder, backend: Backend, config: Config, ranks: Ranks = ONE) -> None:
        self.ranks = ranks
        self.model = model  # with the weights that serve
        self.backend = backend
        self._slots = backend.slots
        self.sampler = Sampler(
            backend.slots,
            model.spec.vocab,
            config.model.logprobs_mode,
            backend.device,
            max_mask=config.model.max_sampling_mask,
        )
        self.hooks = RunnerHooks()
        self._no_autograd = torch.inference_mode()
        self._score_chunk = max(16, min(1024, backend.prompt_logits_bytes // (4 * model.spec.vocab)))  # tokens
        self.spans = Spans()  # of a profile
        self.admin = Admin(self)

    def use(self, features: Iterable[RunnerFeature]) -> None:
        """Serve with these features, before the first step."""
        self.hooks = RunnerHooks(features)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step without grammars."""
        return self.sample(self.forward(plan), None).result()

    def forward(self, plan: StepPlan) -> PendingStep:
        """Begin a step: bring the tables up to date and compute logits, prompt logprobs and pooled vectors."""
        with self._no_autograd, self.spans.span("forward"):
            self._update_tables(plan)
            draws = self.hooks.draw if _has_open_drafts(plan) else ()
            plan = self.backend.begin(plan, needs_history=bool(draws))
            draft_passes = None
            for draw in draws:
                plan, draft_passes = draw(plan)
            if len(plan.draft_token_ids):
                self._slots.write_drafts(plan)
            slots, lengths = logit_lengths(plan)
            step = PendingStep(
                plan, LogitRows(slots, lengths, self._slots.prompt_lens[slots]), draft_passes=draft_passes
            )
            if len(plan.slots) > 0:
                self._compute(step)
            for totals in self.hooks.totals:
                step.totals |= totals()
            return step

    def sample(self, step: PendingStep, bitmask: GrammarBitmask | None) -> PendingResult:
        """Sample the step's tokens, as `bitmask` allows, and keep them for the next step."""
        with self._no_autograd, self.spans.span("sample"):
            if bitmask is not None and len(bitmask.withheld):
                step.withhold(bitmask.withheld)
            if step.logits is None or step.columns is None:
                return PendingResult(step, None)
            sample = self._sampled(step.logits, step.rows, step.columns, bitmask)
            result = PendingResult(step, sample)
            self.backend.finish(result, step.columns, sample.token_ids)
            return result

    def _sampled(
        self, logits: Tensor, rows: LogitRows, columns: SamplingColumns, bitmask: GrammarBitmask | None
    ) -> PendingSample | AwaitedTokens:
        """New tokens, by the rank that has the logits."""
        if not self.ranks.samples:
            return self.ranks.receive_sample(len(rows.slots))
        sample = self.sampler.sample(logits, rows, columns, bitmask)
        self.ranks.broadcast_sample(sample)
        return sample

    def _update_tables(self, plan: StepPlan) -> None:
        """Free slots, and fill those that requests take; what the request before has left there is overwritten."""
        for slot in plan.freed:
            self.sampler.release(slot)
            for release in self.hooks.release:
                release(slot)
        for row in plan.new:
            self._slots.assign(row)
            self.sampler.assign(row)
            for assign in self.hooks.assign:
                assign(row)
        for slot, first, blocks in plan.blocks:
            self._slots.extend(slot, first, blocks)

    def _compute(self, step: PendingStep) -> None:
        plan, rows = step.plan, step.rows
        features = None
        for before in self.hooks.before:
            more = before(plan, self.model)
            features = more if features is None else features.joined(more)
        began = time.monotonic_ns()
        logits = self.backend.replay(plan) if features is None else None
        if logits is not None:
            self.spans.add("replay", began, time.monotonic_ns())
        if logits is None:
            spans = self.sampler.scored_spans(plan.slots, plan.num_computed, plan.num_tokens)
            readers = [
                (reader, row, count) for reader in self.hooks.readers for row, count in reader.needed(plan).items()
            ]
            needed = plan.num_logits
            if spans or readers:
                needed = needed.copy()
                for row, first, _ in spans:  # prompt token j is predicted by position j - 1
                    needed[row] = max(needed[row], plan.num_computed[row] + plan.num_tokens[row] - first + 1)
                for _, row, count in readers:
                    needed[row] = count
            hidden = self.backend.forward(self.model, plan, needed, features)
            scores = {span[0]: self._score(plan, hidden, span) for span in spans}
            if spans:
                step.values[PROMPT_LOGPROBS] = {row: score for row, score in scores.items() if score is not None}
            for reader, row, count in readers:
                end = int(hidden.ends[row])
                if not self.ranks.samples:
                    continue
                vector = reader.after(self.model, plan, row, hidden.states[end - count : end])
                if vector is not None:
                    step.pooled[row] = vector
            logits = self._logits(hidden) if len(rows.slots) else None
            for values in self.hooks.values:
                step.values |= values(plan)
        if self.backend.states is not None:
            step.saved = self.backend.states.saved
        if self.backend.routed is not None:
            step.values["routed_experts"] = self.backend.routed.results(plan, self._slots)
        if logits is not None:
            step.logits, step.columns = logits, self.backend.columns(rows)

    def _logits(self, hidden: HiddenStates) -> Tensor:  # [n, V]
        if hidden.logits_indices is None:
            return self.model.logits(hidden.states)
        return self.model.logits(hidden.states.index_select(0, hidden.logits_indices))

    def _score(self, plan: StepPlan, hidden: HiddenStates, span: Span) -> Int32 | None:
        """Records of the logprobs of the prompt tokens first .. last - 1 of a plan row; None on a rank that has no
        logits."""
        row, first, last = span
        slot, end = int(plan.slots[row]), int(plan.num_computed[row] + plan.num_tokens[row])
        shift = int(hidden.ends[row]) - end - 1  # prompt token j is predicted by state j + shift
        parts = []
        for j in range(first, last, self._score_chunk):
            logits = self.model.logits(hidden.states[j + shift : min(j + self._score_chunk, last) + shift])
            if self.ranks.samples:
                parts.append(self.sampler.score(logits, slot, j))
        return np.concatenate(parts) if parts else None

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """An admin method by name, between two steps."""
        return _method(method, self.admin.calls(), *(feature.calls() for feature in self.hooks.features))(**args)

    def background(self, method: str, args: dict[str, Any]) -> Any:
        """An admin method that may take long, in the background thread."""
        with self.admin.beside_steps():
            return _method(method, *(feature.background_calls() for feature in self.hooks.features))(**args)

    def copy(self, method: str, args: dict[str, Any]) -> Any:
        """A method that copies KV blocks, in the thread of its lane."""
        return _method(method, *(feature.copy_calls() for feature in self.hooks.features))(**args)

    def interrupt(self) -> None:
        """Make what the background thread waits for fail soon; from any thread."""
        for feature in self.hooks.features:
            feature.interrupt()


def _method(name: str, *tables: Calls) -> Callable[..., Any]:
    for table in tables:
        if name in table:
            return table[name]
    raise NotFound(f"the runner has no method {name!r}")


def _has_open_drafts(plan: StepPlan) -> bool:
    """Whether drafts of the plan are still to be drawn."""
    return bool(len(plan.draft_token_ids)) and bool((plan.draft_token_ids == DRAWN).any())
