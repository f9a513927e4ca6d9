"""A step's plan while it is made: rows under a token budget; and the step once it is in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tokserve.engine.request import Request
from tokserve.protocol.plan import DRAWN, Int32, NewRow, StepPlan, StepResult

DRAFT_MODEL = "draft_model"  # the source of drafts that the device draws


class ScheduledRow(msgspec.Struct, eq=False, gc=False):
    """A request's part in one step: `num_tokens` positions, the last of them `drafts`; see `StepPlan`.

    `source`: where the drafts come from.  `saves`: (position, snapshot) of those that its state passes, unless earlier
    drafts are rejected.
    """

    request: Request
    num_tokens: int
    num_logits: int
    drafts: Sequence[int] = ()
    source: str = ""
    saves: Sequence[tuple[int, int]] = ()

    @property
    def is_drawn(self) -> bool:
        """Whether the device draws the drafts."""
        return self.source == DRAFT_MODEL


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A planned step whose result is not here yet.  `future`: its result, once it is sampled from."""

    step: int
    rows: list[ScheduledRow]
    weight_version: str
    num_new: int
    num_tokens: int
    num_logits: int
    planned: float  # when, by the clock of `Scheduler.schedule`
    future: Future[StepResult] | None = None

    def set_drawn(self, token_ids: Int32) -> None:
        """The step's drafts, those of all rows, with what the device has drawn."""
        first = 0
        for row in self.rows:
            last = first + len(row.drafts)
            if row.is_drawn:
                row.drafts = token_ids[first:last].tolist()
            first = last

    def summary(self) -> str:
        """One line for the log of a crash; no token values."""
        num_tokens = [row.num_tokens for row in self.rows]
        return (
            f"step {self.step}: {len(self.rows)} rows, {sum(num_tokens)} tokens, {self.num_new} new, "
            f"slots {[row.request.slot for row in self.rows]}, num_tokens {num_tokens}, "
            f"num_drafts {[len(row.drafts) for row in self.rows]}"
        )


@dataclass(slots=True)
class PlanBuilder:
    """A plan being made.  `short`: blocks are or were missing in this step, so no request is admitted.  `held`: the
    budget does not hold a prompt's image, which is next: no later prompt has what is left."""

    budget: int
    shares: dict[str, int] = field(default_factory=dict)  # tokens that each of several clients may still have
    rows: list[ScheduledRow] = field(default_factory=list)
    new: list[NewRow] = field(default_factory=list)
    short: bool = False
    held: bool = False

    @classmethod
    def of(cls, budget: int, clients: Collection[str], num_active: int = 0) -> PlanBuilder:
        """An empty plan, whose budget the clients share equally if there are several: in `num_active` parts if only
        so many of them have something to compute."""
        parts = max(1, num_active or len(clients))
        return cls(budget, dict.fromkeys(clients, max(1, budget // parts)) if len(clients) > 1 else {})

    def allowed(self, request: Request) -> int:
        """Tokens that a request may have of its client's share."""
        return min(self.budget, self.shares.get(request.client, self.budget))

    def add(self, request: Request, num_tokens: int) -> None:
        is_last = request.num_computed + num_tokens == request.num_tokens
        self.rows.append(ScheduledRow(request, num_tokens, 1 if is_last and not request.prompt_only else 0))
        self._spend(request, num_tokens)

    def add_decode(self, request: Request) -> None:
        """A row for a request that generates and lacks one token."""
        self.rows.append(ScheduledRow(request, 1, 1))
        self.budget -= 1
        if self.shares:
            self.shares[request.client] = max(0, self.shares[request.client] - 1)

    def extend(self, row: ScheduledRow, num_tokens: int) -> None:
        """More positions in a row."""
        request = row.request
        row.num_tokens += num_tokens
        is_last = request.num_computed + row.num_tokens == request.num_tokens
        row.num_logits = 1 if is_last and not request.prompt_only else 0
        self._spend(request, num_tokens)

    def _spend(self, request: Request, num_tokens: int) -> None:
        self.budget -= num_tokens
        if self.shares:
            self.shares[request.client] = max(0, self.shares[request.client] - num_tokens)

    def add_drafts(self, row: ScheduledRow, drafts: Sequence[int], source: str) -> None:
        """Positions of drafts in a row that generates; `source`: where they come from, unless the device draws them."""
        row.drafts = drafts
        row.source = DRAFT_MODEL if drafts[0] == DRAWN else source
        row.num_tokens += len(drafts)
        row.num_logits += len(drafts)
        self._spend(row.request, len(drafts))

    def drop(self, request: Request) -> None:
        """Remove the row of a request that was preempted."""
        for row in self.rows:
            if row.request is request:
                self.rows.remove(row)
                self.budget += row.num_tokens
                return

    def build(self, step: int, freed: list[int], weight_version: str, now: float) -> tuple[StepPlan, InFlightStep]:
        """The plan, whose positions and tokens count as computed and in flight from here on; `freed`: slots."""
        rows = self.rows
        requests = [row.request for row in rows]
        starts, blocks = [], []
        drafts: list[int] = []
        num_drafts = np.zeros(len(rows), np.int32)
        saves: list[tuple[int, int, int]] = []
        num_tokens = [row.num_tokens for row in rows]
        for index, row in enumerate(rows):
            request = requests[index]
            table = request.table
            if len(table.blocks) > table.num_sent:
                blocks.append((request.slot, table.num_sent, table.blocks[table.num_sent :]))
                table.num_sent = len(table.blocks)
            starts.append(request.num_computed)
            request.num_computed += num_tokens[index]
            if row.num_logits:
                request.num_in_flight += row.num_logits
                request.is_decoding = True
            request.steps_in_flight += 1
            request.last_step = step
            if row.drafts:
                num_drafts[index] = len(row.drafts)
                drafts += row.drafts
            if row.saves:
                saves += [(request.slot, position, snapshot) for position, snapshot in row.saves]
        plan = StepPlan(
            step=step,
            slots=np.array([request.slot for request in requests], np.int32),
            num_tokens=np.array(num_tokens, np.int32),
            num_computed=np.array(starts, np.int32),
            num_drafts=num_drafts,
            num_logits=np.array([row.num_logits for row in rows], np.int32),
            draft_token_ids=np.array(drafts, np.int32),
            new=self.new,
            blocks=blocks,
            freed=freed,
            saves=saves,
        )
        num_logits = sum(row.num_logits for row in rows)
        return plan, InFlightStep(step, rows, weight_version, len(self.new), sum(num_tokens), num_logits, now)
