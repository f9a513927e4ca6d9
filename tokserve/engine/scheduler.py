"""Which request computes what in each step: computed tokens catch up with known ones under a token budget.

Chunked prefill, prefix hits, resumption after preemption, decoding and drafts are all cases of that.  `schedule` writes
a plan and counts its tokens as computed; `update` takes the result of the oldest step in flight, and rolls back what
drafts were rejected.  With one step answered before the next is planned (depth 1) or one in between (depth 2) the code
is the same: slots and blocks that a step in flight mentions are not freed until its result is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tokserve.config import SchedulerConfig
from tokserve.engine.counters import Counters
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.output.columns import StepRows
from tokserve.engine.pace import StepPace
from tokserve.engine.plan_builder import InFlightStep, PlanBuilder
from tokserve.engine.request import Request, State
from tokserve.engine.request_slots import RequestSlots
from tokserve.engine.sharing import MAX_DISPLACED
from tokserve.protocol.plan import NOT_FINITE, OK, StepPlan, StepResult


def take_rows(
    step: InFlightStep, result: StepResult, cache: PrefixCache, counters: Counters, now: float
) -> Iterator[tuple[Request, int]]:
    """Each request of the step, once it has what the result brings it, and the number of tokens that were sampled for
    it; a request that had ended before gets nothing."""
    token_ids, values = result.token_ids.tolist(), result.values
    step_columns = {name: StepRows(rows) for name, rows in result.columns.items()}
    last = 0  # of the rows' tokens so far
    block_size, version, num_output = cache.block_size, step.weight_version, 0
    columns = zip(step.rows, result.counts.tolist(), result.status.tolist(), strict=True)
    for index, (row, count, status) in enumerate(columns):
        request = row.request
        request.steps_in_flight -= 1
        first, last = last, last + count
        if request.state is not State.ENDED:  # else it is surplus: its end was found after this plan was made
            for name, by_row in values.items():
                if index in by_row:
                    start = request.num_settled
                    request.output.collect(name, start, start + row.num_tokens, by_row[index])
            request.num_in_flight -= row.num_logits
            rejected = row.num_logits - count  # drafts, or the position whose token was withheld
            request.on_computed(version, row.num_tokens, rejected)
            if rejected:
                request.roll_back(rejected)
            if status != OK:
                counters.nan_requests += status == NOT_FINITE
                request.on_status(status, now)
            elif count:
                num_output += request.append(token_ids[first:last], step_columns, first, now)
            elif request.prompt_only and request.num_settled == request.prompt_len:
                request.on_prompt_computed(now)
            if request.num_settled >= (request.table.num_full + 1) * block_size:
                settled = min(request.num_settled, len(request.tokens))  # a stop may have dropped accepted drafts
                cache.cache_full_blocks(request.table, request.tokens, settled)
        yield request, count
    counters.output_tokens += num_output


class Scheduler(RequestSlots):
    """Plans steps of the requests, and takes their results.

    A request fits when its blocks do: all blocks of its known tokens are allocated at admission (and one block for
    each running request must be left, so that admission does not cause preemption at once); only growth by new
    tokens can then run out of blocks, and preempts.  Drafts never preempt.  Who is next, and who gives way, is up to
    `Sharing`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        weight_version: str,
        *,
        joint_tokens: int = 0,
    ) -> None:
        """`joint_tokens`: the most of a request that a step has to compute together; a step's budget holds them."""
        super().__init__(config, cache, weight_version)
        self.joint_tokens = joint_tokens
        self.barrier: int | None = None  # requests with this number and above are not admitted
        self.in_flight: deque[InFlightStep] = deque()  # oldest first
        self.pace = StepPace()
        self._step = 0
        self._answered = 0.0  # when the last result came

    def tokens_per_second(self) -> float:
        """How fast prompts are computed, as measured; 0.0 while it is not known."""
        return self.pace.tokens_per_second()

    # --- plan ---

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, which is in flight from here on; None if there is nothing to compute before the next `update`
        or `add`."""
        self._displace()
        builder = self._build(now)
        while not builder.rows and builder.short and self._displace():  # the requests that held the blocks do not run
            builder = self._build(now)
        if not builder.rows:
            return None
        for prepare in self._hooks.plan:
            prepare(builder)
        plan, step = builder.build(self._step, self._freed, self.weights.version, now)
        self.in_flight.append(step)
        for on_planned in self._hooks.on_planned:
            on_planned(step)
        self._step += 1
        self._freed = []
        return plan

    def _build(self, now: float) -> PlanBuilder:
        builder = self._sharing.builder(self, now)
        order = self._sharing.order(self.running, builder)
        self._continue(builder, order)
        self._admit(builder, now, beyond=not builder.shares)
        if not builder.short:
            for draft in self._hooks.draft:
                draft(builder)  # of a client's share, so before what exceeds the shares
        if builder.shares:
            self._admit(builder, now, beyond=True)
        if builder.budget and builder.shares:
            self._sharing.fill(self, builder)
        self._short = builder.short
        return builder

    def _continue(self, builder: PlanBuilder, order: Sequence[Request]) -> None:
        """Rows for running requests, in this order, but those that lack one token first, so that no prompt delays them.
        A client gets at most its share of the budget, so that other clients' requests get on and are admitted."""
        prompts = []
        contended = bool(builder.shares)
        block_size = self._cache.block_size
        for request in order:
            if request.state is not State.RUNNING:  # it was preempted just now
                continue
            if request.gates and request.is_held:
                continue
            num_tokens, num_computed = request.num_tokens, request.num_computed
            if num_tokens - num_computed > 1 or request.prompt_only:
                prompts.append(request)
            elif num_tokens < request.limit and not (request.stalled and self.is_idle(request)):
                budget = builder.allowed(request) if contended else builder.budget
                if budget and (num_computed % block_size or self.make_room(request, builder)):  # else within its block
                    builder.add_decode(request)
        for request in prompts:
            budget = builder.allowed(request)
            if request.state is State.RUNNING and budget and request.num_tokens > request.num_computed:
                count = self.chunk(request, budget, builder.budget)
                if not count:
                    builder.held = True
                    return
                builder.add(request, count)

    def is_idle(self, request: Request) -> bool:
        """Whether it gets no tokens, as its client does not read.  Its prompt is computed all the same, since others
        may wait for that; and a command that waits for the end of all requests waits for no client."""
        return request.stalled and request.is_decoding and self.barrier is None

    def chunk(self, request: Request, budget: int, most: int, computed: int | None = None) -> int:
        """Tokens of a request in a step.  An image that cannot be divided may exceed `budget`, a client's share, and
        the option max_chunk, but not `most`; 0: it does.  `computed`: what will be when the request has a slot."""
        computed = request.num_computed if computed is None else computed
        count = min(request.num_tokens - computed, budget)
        if self._config.max_chunk is not None and len(self.running) + len(self._waiting) > 1:
            count = min(count, self._config.max_chunk)
        return request.without_cuts(computed, count, most) if request.joint else count

    def make_room(self, request: Request, builder: PlanBuilder) -> bool:
        """A block for the next position, if need be the victim's.  False: not in this step."""
        while not self._cache.extend(request.table, request.num_computed + 1):
            builder.short = True
            if self._leaving:  # their blocks are free when the step in flight is answered
                return False
            victim = self._sharing.choose_victim(self.running, self.is_idle)
            self._preempt(victim)
            builder.drop(victim)
            if victim is request:
                return False
        return True

    def _displace(self) -> bool:
        """Preempt for waiting requests that find no slot, or no blocks: stalled requests, and those that `Sharing`
        chooses.  Whether any was preempted."""
        if self.barrier is not None and self._parked:
            for request in self._parked:
                self._waiting.add(request)
            self._parked.clear()
        may_displace = self._sharing.is_contested or self._stalled
        if not may_displace or not self._waiting or (self._num_open and not self._short):
            return False
        room = 0 if self._short else self._num_open + len(self._leaving)
        count = room + (1 if self._short else MAX_DISPLACED)  # for blocks one after the other, until there are enough
        slots = self._sharing.slots()
        before = self.counters.displaced
        for index, request in enumerate(list(islice(filter(self.may_enter, self._waiting), count))):
            if index >= room:
                victim = self._sharing.choose_displaced(request, self.running, slots, self.is_idle)
                if victim is None:
                    break
                self._preempt(victim)
                self.counters.displaced += 1
                slots[victim.client] -= 1
            slots[request.client] += 1
        return self.counters.displaced > before

    def may_enter(self, request: Request) -> bool:
        """Whether it waits neither for the barrier, a feature, a prefix that is being computed, nor its client."""
        return self._obstacle(request) is None

    def waits_for(self, request: Request) -> str | None:
        """What a request without a slot waits for: `pause` (one that lets others end first), `client` (to read), the
        name of a gate, `prefix` (another request computes it), what a feature says, `memory` (blocks) or `slot`."""
        if request.state is State.RUNNING:
            return None
        return self._obstacle(request) or ("memory" if self._short and self._num_open > 0 else "slot")

    def _obstacle(self, request: Request) -> str | None:
        if self.barrier is not None and request.number >= self.barrier:
            return "pause"
        if request.stalled and self.barrier is None:
            return "client"
        for gate in request.gates:
            if not gate.is_open():
                return gate.name
        if self._cache.must_wait(request.table):
            return "prefix"
        for kept_for in self._hooks.kept_for:
            if (name := kept_for(request)) is not None:
                return name
        return None

    def _admit(self, builder: PlanBuilder, now: float, beyond: bool) -> None:
        """Waiting requests in order, while slots, budget and blocks last.  One whose prefix is being computed for
        another, that a feature holds, or that is behind the barrier, is passed over; one that does
        not fit holds up those behind it.  `beyond`: also those of a client whose share of this step is used up.

        No more requests run than tokens fit in a step, so each gets on.
        """
        self._deferred = 0
        order = self._waiting.order()
        while builder.budget and self._num_open > 0 and not builder.short and not builder.held:
            request = next(order, None)
            if request is None or not (beyond or builder.allowed(request)):
                break
            hits = None
            if self.may_enter(request):
                usable = request.reusable_blocks(self._cache.block_size)
                hits = self._cache.lookup(request.table, request.tokens, usable)
            if hits is None:
                self._deferred += 1
                continue
            computed = min(hits * self._cache.block_size, request.reusable)
            for reuse in self._hooks.reuse:
                computed = max(computed, reuse(request, hits))
            count = self.chunk(request, max(1, builder.allowed(request)), builder.budget, computed)
            if not count and request.joint:
                builder.held = True
            elif self._cache.allocate(request.table, request.tokens, hits, reserve=len(self.running)):
                self._assign_slot(request, computed, now)
                fields: dict[str, Any] = {}
                for on_slot in self._hooks.on_slot:
                    fields |= on_slot(request, hits)
                builder.new.append(request.new_row(fields))
                builder.add(request, count)
            else:
                builder.short = True

    # --- result ---

    def update(self, result: StepResult, now: float) -> list[Request]:
        """Take the result of the oldest step in flight; returns the requests that have output to send."""
        step = self.in_flight.popleft()
        if step.step != result.step:
            raise RuntimeError(f"the result is of step {result.step}, but step {step.step} is the oldest in flight")
        self.counters.steps += 1
        self.counters.tokens_by_step.add(step.num_tokens)
        seconds = now - max(step.planned, self._answered)
        if result.draft_passes is not None:
            seconds -= result.draft_passes.seconds
        self.pace.record(step.num_tokens, seconds)
        for before_update in self._hooks.before_update:
            before_update(step, result, seconds)
        self._answered = now
        requests = []
        for request, count in take_rows(step, result, self._cache, self.counters, now):
            if request.state is not State.ENDED:
                if request.finish is not None:
                    self.drop(request)
                    requests.append(request)
                elif count and request.options.stream:
                    requests.append(request)
            if self._leaving and request in self._leaving:
                self._release_slot(request)
        return requests
