"""Structured outputs as the engine's loop sees them: grammars are compiled before requests are accepted, and masks
computed between the step that brought a token and the next one that samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokserve.engine.features import EngineContext
from tokserve.engine.hooks import EngineFeature, Prerequisite
from tokserve.engine.plan_builder import InFlightStep, ScheduledRow
from tokserve.engine.request import Gate, Request
from tokserve.features.grammar.followed import FollowedGrammar
from tokserve.features.grammar.grammars import Grammars
from tokserve.features.grammar.mask_worker import MaskWorker
from tokserve.protocol.params import SamplingParams
from tokserve.protocol.plan import GrammarBitmask, StepResult, UInt32

Rows = list[tuple[ScheduledRow, FollowedGrammar]]


class GrammarFeature(EngineFeature):
    """The grammars of requests in flight.  `grammars` compiles them, `masks` computes their masks."""

    def __init__(self, context: EngineContext) -> None:
        self.grammars = Grammars(context.config, context.facts.vocab_size, context.limits.eos)
        self.masks = MaskWorker(context.wake)
        self._outbox, self._clock, self._executor = context.outbox, context.clock, context.executor
        self._followed: dict[Request, FollowedGrammar] = {}
        self._rows: dict[int, Rows] = {}  # that sample under a grammar, by steps in flight
        self._begun: list[FollowedGrammar] = []  # since the last poll

    def prepare(self, request: Request) -> Prerequisite | None:
        task = request.task
        if not isinstance(task, SamplingParams) or task.structured_outputs is None:
            return None
        followed = FollowedGrammar(request, self.grammars.compile(task.structured_outputs, request.client))
        self._followed[request] = followed
        request.gates += (Gate("grammar", lambda: followed.is_ready),)
        return Prerequisite(followed.future, lambda: self._begin(followed), "the grammar could not be compiled")

    def _begin(self, followed: FollowedGrammar) -> None:
        followed.begin()
        self._begun.append(followed)

    def on_end(self, request: Request) -> None:
        self._followed.pop(request, None)

    # --- steps ---

    def may_draft(self, request: Request) -> bool:
        """Drafts under a grammar need masks, made of tokens that are known."""
        followed = self._followed.get(request)
        if followed is None:
            return True
        return followed.state is not None and not request.num_in_flight and not followed.state.is_slow

    def on_planned(self, step: InFlightStep) -> None:
        if not self._followed:
            return
        rows = [(row, self._followed[row.request]) for row in step.rows if row.num_logits and self._follows(row)]
        if rows:
            self._rows[step.step] = rows

    def _follows(self, row: ScheduledRow) -> bool:
        return row.request in self._followed

    def can_sample(self, step: InFlightStep) -> bool:
        """Whether no earlier step is still to bring a token that a mask depends on."""
        rows = self._rows.get(step.step, ())
        return all(row.request.finish is not None or row.request.num_in_flight == row.num_logits for row, _ in rows)

    def bitmask(self, step: InFlightStep) -> GrammarBitmask | None:
        """The masks of the rows with a grammar.  Rows whose mask is late, or whose request has ended, are withheld."""
        rows = self._rows.get(step.step)
        if rows is None:
            return None
        if any(row.is_drawn for row, _ in rows):  # masks depend on drafts that the device draws
            step.set_drawn(self._executor.drafts())
        slots: list[int] = []
        bits: list[UInt32] = []
        withheld: list[int] = []
        for row, followed in rows:
            request, state = row.request, followed.state
            if request.finish is None and followed.is_ready and state is not None:
                masks = state.bits_along(row.drafts) if row.drafts else [state.bits]
                slots += [request.slot] * len(masks)
                bits += masks
            else:
                followed.withheld = True
                withheld.append(request.slot)
        stacked = np.stack(bits) if bits else np.empty((0, 0), np.uint32)
        return GrammarBitmask(np.array(slots, np.int32), stacked, np.array(withheld, np.int32))

    def on_result(self, step: InFlightStep, result: StepResult, now: float) -> None:
        rows = self._rows.pop(step.step, None)
        if rows is None:
            return
        for _, followed in rows:
            followed.withheld = False
        self.masks.submit(followed for row, followed in rows if row.request.finish is None)
        self._take_masks(now)

    def _take_masks(self, now: float) -> None:
        """Use the masks that have been computed; requests that end by them are left in the outbox."""
        for followed in self.masks.poll():
            state, request = followed.state, followed.request
            if state is not None and state.error is not None:
                self.grammars.forget(state.grammar)
            if request.finish is None:
                followed.on_bitmask(now)
                if request.finish is not None:
                    self._outbox.ended.append(request)

    # --- the loop ---

    def poll(self) -> None:
        if self._begun:
            begun, self._begun = self._begun, []
            self.masks.submit(begun)
        if self.masks:
            self._take_masks(self._clock())

    def is_busy(self) -> bool:
        return bool(self.masks)

    def stats(self) -> dict[str, Any]:
        grammars = self.grammars
        return {
            "grammar_bytes": grammars.num_bytes,
            "grammars_compiling": grammars.num_compiling,
            "grammar_refusals": grammars.num_refused,
        }

    def close(self) -> None:
        self.grammars.close()
        self.masks.close()
