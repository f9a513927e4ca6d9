"""Drafts as the engine's loop sees them: proposed for rows of a plan, counted when they are verified, and reported."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakValueDictionary

from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature
from tokserve.engine.plan_builder import InFlightStep, PlanBuilder, ScheduledRow
from tokserve.engine.request import Request, State
from tokserve.features.speculation.columns import DRAFTS
from tokserve.features.speculation.draft_counters import DraftCounters
from tokserve.features.speculation.draft_log import DraftLog
from tokserve.features.speculation.draft_state import Corpus, DraftState
from tokserve.features.speculation.drafter import Drafter, NoDrafts, TextDrafter, prediction_index
from tokserve.features.speculation.token_index import TokenIndex
from tokserve.protocol.messages import DraftCounts, EngineRequest
from tokserve.protocol.plan import StepResult


class DraftReports(EngineFeature):
    """What requests are told of drafts, also by an engine that has none: how well the client's prediction was met."""

    def __init__(self) -> None:
        self._followers: dict[Request, DraftState] = {}  # through the prediction, token by token
        self._predictions: WeakValueDictionary[bytes, TokenIndex] = WeakValueDictionary()  # choices share them

    @property
    def commands(self) -> Sequence[object]:
        return (NoDrafts(),)

    def attach(self, request: Request, spec: EngineRequest) -> None:
        if not spec.drafts:
            return
        prediction = self._predictions.get(spec.drafts)
        if prediction is None:
            prediction = self._predictions[spec.drafts] = prediction_index(spec.drafts)
        self._expect(request, prediction)

    def _expect(self, request: Request, prediction: TokenIndex) -> None:
        """The output may be these tokens."""
        corpus = Corpus("prediction", prediction, expected=True)
        follower = DraftState(request.tokens, request.prompt_len, [corpus], (corpus, 0), searches=False)
        self._followers[request] = follower
        request.listeners += (lambda token: follower.advance(),)

    def on_end(self, request: Request) -> None:
        follower, counts = self._followers.pop(request, None), self._counts(request)
        if follower is not None:
            counts = counts._replace(predicted=follower.num_hits)
        if counts != DraftCounts():
            request.output.values[DRAFTS] = counts

    def _counts(self, request: Request) -> DraftCounts:
        """What was drafted for a request that has ended."""
        return DraftLog().added_to(DraftCounts()) if request.options.reports_drafts else DraftCounts()


class Speculation(DraftReports):
    """Drafts of `drafter` in the rows of plans."""

    def __init__(self, context: EngineContext, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter
        self._cache, self._scheduler, self._hooks = context.cache, context.scheduler, context.hooks
        self._counters = DraftCounters()
        self._drafted: dict[Request, DraftCounts] = {}  # those that had drafts
        self._logs: dict[Request, DraftLog] = {}  # of those that want them reported

    @property
    def commands(self) -> Sequence[object]:
        return (self.drafter if isinstance(self.drafter, TextDrafter) else NoDrafts(),)

    def _expect(self, request: Request, prediction: TokenIndex) -> None:
        super()._expect(request, prediction)
        self.drafter.expect(request, prediction)

    def on_end(self, request: Request) -> None:
        super().on_end(request)
        self.drafter.on_end(request)

    def _counts(self, request: Request) -> DraftCounts:
        counts, log = self._drafted.pop(request, DraftCounts()), self._logs.pop(request, None)
        if log is None and request.options.reports_drafts:
            log = DraftLog()
        return counts if log is None else log.added_to(counts)

    # --- drafts in a plan ---

    def draft(self, builder: PlanBuilder) -> None:
        """Propose drafts for rows that sample, without preempting.  Of several clients each has drafts for what is left
        of its share: else those that are likeliest would take the place of the others'."""
        rows: dict[str, list[ScheduledRow]] = {}
        for row in builder.rows:
            if row.num_logits and row.request.options.speculate and self._may_draft(row.request):
                rows.setdefault(row.request.client if builder.shares else "", []).append(row)
        for of_client in rows.values():
            self._draft(builder, of_client)

    def _may_draft(self, request: Request) -> bool:
        return not request.gates or all([may_draft(request) for may_draft in self._hooks.may_draft])

    def _draft(self, builder: PlanBuilder, candidates: Sequence[ScheduledRow]) -> None:
        """Drafts for these rows."""
        rows: list[ScheduledRow] = []
        limits: list[int] = []
        for row in candidates:
            request = row.request
            limit = min(builder.allowed(request), request.limit - request.num_tokens - 1)
            if limit > 0:
                rows.append(row)
                limits.append(limit)
        if not rows:
            return
        num_tokens = sum(row.num_tokens for row in builder.rows)
        proposals = self.drafter.propose([row.request for row in rows], limits, num_tokens)
        running = self._scheduler.num_running
        for row, limit, proposed in zip(rows, limits, proposals, strict=True):
            request = row.request
            drafts = proposed[: min(limit, builder.allowed(request))]
            if drafts and self._cache.extend(request.table, request.num_tokens + len(drafts), running):
                builder.add_drafts(row, drafts, self.drafter.source(request))

    # --- their verification ---

    def before_update(self, step: InFlightStep, result: StepResult, seconds: float) -> None:
        passes = result.draft_passes
        behind: Collection[int] = () if passes is None else passes.behind
        if passes is not None:
            self.drafter.on_drawn(passes, sum(row.is_drawn for row in step.rows))
        if step.num_logits == step.num_tokens:
            self.drafter.on_step(len(step.rows), step.num_tokens, seconds)
        for index, row in enumerate(step.rows):
            if row.drafts and index not in behind and row.request.state is not State.ENDED:
                self._count(row, max(0, int(result.counts[index]) - 1))

    def _count(self, row: ScheduledRow, accepted: int) -> None:
        request, proposed = row.request, len(row.drafts)
        self._counters.record(row.source, proposed, accepted)
        before = self._drafted.get(request, DraftCounts())
        self._drafted[request] = DraftCounts(before.steps + 1, before.proposed + proposed, before.accepted + accepted)
        if request.options.reports_drafts:
            self._logs.setdefault(request, DraftLog()).record(row.source, proposed, accepted)
        if row.is_drawn:
            self.drafter.on_verified(request, proposed, accepted)

    def stats(self) -> dict[str, Any]:
        return self._counters.values()

    def clear(self) -> None:
        """Drop the earlier outputs that are kept as drafts."""
        if isinstance(self.drafter, TextDrafter):
            self.drafter.history.clear()


def make(context: EngineContext) -> EngineFeature:
    """Drafts of the configured method, or reports of predictions only."""
    plan = context.config.speculation.resolved()
    if plan.method == "none":
        return DraftReports()
    return Speculation(context, TextDrafter(plan, context.facts.vocab_size))
