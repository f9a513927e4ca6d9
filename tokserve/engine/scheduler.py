"""Who computes what in each step: computed tokens catch up with wanted ones under a token budget.

Chunked prefill, prefix hits, resumption after preemption and decoding are all cases of that.  `schedule` writes a
plan and counts its tokens as computed; `update` takes the result of the oldest plan not yet answered.  With one
plan answered before the next is made (depth 1) or one in between (depth 2) the code is the same: what a plan in
flight mentions is not freed until its result is here.  Knows no clock, no messages and no device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tokserve.config import SchedulerConfig
from tokserve.engine.cache import Cache
from tokserve.engine.columns import PackedRows
from tokserve.engine.draft import Draft, Row
from tokserve.engine.fairness import FairQueue, Shares
from tokserve.engine.policies import POLICIES
from tokserve.engine.queue import Queue, QueueLimits
from tokserve.engine.request import Request, State
from tokserve.messages import AGES, StepStats
from tokserve.plan import StepPlan, StepResult

EPOCHS_KEPT = 1000
DISPLACED = 8  # most preemptions a step in favour of other clients


@dataclass(slots=True)
class Flight:
    """A plan whose result is not here yet, and the weights it ran with."""

    step: int
    rows: list[Row]
    weight_version: str


@dataclass(slots=True)
class Counters:
    """Since the engine's start; tokens unless said otherwise."""

    steps: int = 0  # steps
    preemptions: int = 0  # preemptions
    displaced: int = 0  # preemptions
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    nan_requests: int = 0  # requests
    tokens_by_age: list[int] = field(default_factory=lambda: [0] * AGES)


class Scheduler:
    """All requests that have not ended, the slots, and the tables of the cache.

    A request fits when its blocks do: all blocks of its known tokens are allocated at admission (and one block for
    each running request must be left, so that admission does not cause preemption at once); only growth by new
    tokens can then run out of blocks, and preempts.

    Clients are served alike (`fairness`): the one with the fewest slots is next, and while it waits for a slot or for
    blocks, a client with at least two slots more gives up its last request's.  A request that is stalled gets no
    tokens; it keeps its slot and its blocks until somebody else needs them.
    """

    def __init__(self, config: SchedulerConfig, cache: Cache, weight_version: str) -> None:
        self.weight_version = weight_version
        self.barrier: int | None = None  # requests with this number and above are not admitted
        self.counters = Counters()
        self._config = config
        self._cache = cache
        self._policy = policy = POLICIES[config.scheduling_policy]
        self.shares = Shares()
        self._waiting = FairQueue(policy, self.shares)
        self._parked: set[Request] = set()  # stalled, and without a slot
        self._stalled: set[Request] = set()
        self._limits = QueueLimits(config.max_queued_requests, config.max_queued_tokens)
        self._short = False  # blocks were missing when the last plan was made, so a free slot may mean nothing
        self._deferred = 0  # waiting requests that the last plan passed over
        self._running = Queue(policy)
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))  # a stack
        self._done: list[int] = []  # slots freed since the last plan
        self._leaving: set[Request] = set()  # have a slot until a step in flight is answered
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._epoch = 0
        self._epochs = {weight_version: 0}  # of the latest versions

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting) + len(self._parked)

    @property
    def num_stalled(self) -> int:
        """Requests whose client does not read."""
        return len(self._stalled)

    def num_live(self, client: str) -> int:
        """Requests of a client that have not ended."""
        return self.shares.live[client]

    @property
    def num_free_slots(self) -> int:
        """Slots that a request could enter."""
        return len(self._free_slots)

    @property
    def _num_open(self) -> int:
        """Requests that may enter now: no more run than there are slots, and tokens in a step."""
        return min(len(self._free_slots), self._config.max_num_batched_tokens - len(self._running))

    @property
    def running(self) -> Iterable[Request]:
        """Requests with a slot that have not ended."""
        return self._running

    def stats(self) -> StepStats:
        """Gauges and counters of this moment."""
        pool, count = self._cache.pool, self.counters
        return StepStats(
            running=len(self._running), waiting=self.num_waiting, blocks_held=pool.num_held,
            blocks_cached=pool.num_cached, blocks_total=pool.total, steps=count.steps, preemptions=count.preemptions,
            prompt_tokens=count.prompt_tokens, output_tokens=count.output_tokens,
            prefix_queries=count.prefix_queries, prefix_hits=count.prefix_hits, nan_requests=count.nan_requests,
            tokens_by_age=count.tokens_by_age.copy(),
            deferred=min(self._deferred, len(self._waiting)) + len(self._parked),
            clients=len(self.shares.live), stalled=len(self._stalled), displaced=count.displaced,
        )  # fmt: skip

    def use_weights(self, version: str, epoch: int) -> None:
        """Plans made from now on run with these weights."""
        self.weight_version, self._epoch = version, epoch
        self._epochs.pop(version, None)
        self._epochs[version] = epoch
        if len(self._epochs) > EPOCHS_KEPT:
            del self._epochs[next(iter(self._epochs))]

    def count_ages(self, request: Request) -> None:
        """An ended request's tokens, by how many epochs ago the weights that made them were replaced."""
        for version, _, start, end in request.spans:
            age = self._epoch - self._epochs.get(version, 0)
            self.counters.tokens_by_age[min(age, AGES - 1)] += end - start

    def add(self, request: Request) -> None:
        """Let a new request wait for its turn."""
        self._waiting.add(request)
        self.shares.came(request)
        self._limits.entered(request.prompt_len)

    def stall(self, request: Request, stalled: bool) -> None:
        """Its client does not read what it has been sent, or reads again."""
        request.stalled = stalled
        if stalled:
            self._stalled.add(request)
            return
        self._stalled.discard(request)
        if request in self._parked:
            self._parked.remove(request)
            self._waiting.add(request)

    def excess(self, lengths: Sequence[int], now: float) -> tuple[str, int] | None:
        """Why new requests with prompts of these lengths may not wait, and after how many seconds to ask again.

        Requests that will have a free slot with the next plan do not wait.
        """
        if not self._limits.active:
            return None
        slots = 0 if self._short else len(self._free_slots)
        soon = [request.prompt_len for request in islice(self._waiting, slots) if request.admitted is None]
        return self._limits.excess(lengths, [*soon, *lengths][:slots], now)

    def drop(self, request: Request) -> None:
        """A request that has a `finish` stops here; slot and blocks follow when no step in flight mentions it."""
        if request in self._parked:
            self._parked.remove(request)
        elif request.state is State.WAITING:
            self._waiting.remove(request)
            if request.admitted is None:
                self._limits.gone(request.prompt_len)
        elif request.state is State.RUNNING:
            self._stop_running(request)
        self._stalled.discard(request)
        self.shares.ended(request)
        request.state = State.ENDED
        if request.slot >= 0:
            self._leave(request)

    # --- plan ---

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None if there is nothing to compute before the next `update` or `add`."""
        self._displace()
        draft = self._draft(now)
        while not draft.rows and draft.short and self._displace():  # those who held the blocks do not run
            draft = self._draft(now)
        return self._plan(draft) if draft.rows else None

    def _draft(self, now: float) -> Draft:
        draft = Draft(self._config.max_num_batched_tokens)
        self._deferred = 0
        self._continue(draft)
        if not draft.short:
            self._admit(draft, now)
        self._fill(draft)
        self._short = draft.short
        return draft

    def _continue(self, draft: Draft) -> None:
        """Rows for running requests: those that lack one token first, so that no prompt delays them.  Prompts of a
        client take at most its share of what is left, so that other clients' requests can enter."""
        prompts = []
        for request in list(self._running):
            if request.state is not State.RUNNING or not request.may_draw:  # preempted by one before it, or no mask
                continue
            wanted = request.wanted
            if wanted - request.computed > 1:
                prompts.append(request)
            elif self._holds_still(request):
                continue
            elif wanted < request.limit and draft.budget and self._make_room(request, draft):
                draft.add(request, 1)
        shares = dict.fromkeys(self.shares.present, max(1, draft.budget // max(1, len(self.shares.present))))
        for request in prompts:
            budget = min(draft.budget, shares[request.share])
            if request.state is State.RUNNING and budget:
                count = self._chunk(request, budget)
                draft.add(request, count)
                shares[request.share] -= count

    def _fill(self, draft: Draft) -> None:
        """What nobody else has used of the budget goes to running prompts that were cut to their client's share."""
        if not draft.budget or len(self.shares.present) < 2:
            return
        rows = {row.request: row for row in draft.rows}
        for request in self._running:
            row = rows.get(request)
            count = 0 if row is None else row.count
            if request.wanted - request.computed > max(1, count) and request.may_draw and draft.budget:
                more = self._chunk(request, count + draft.budget) - count
                if row is None:
                    draft.add(request, more)
                elif more > 0:
                    draft.extend(row, more)

    def _holds_still(self, request: Request) -> bool:
        """It gets no tokens, as its client does not read those it has.  Its prompt is computed all the same, since
        others may wait for that; and a verb that waits for the end of all requests waits for no client."""
        return request.stalled and request.drawn and self.barrier is None

    def _chunk(self, request: Request, budget: int) -> int:
        count = min(request.wanted - request.computed, budget)
        if self._config.max_chunk is not None and len(self._running) + len(self._waiting) > 1:
            count = min(count, self._config.max_chunk)
        return count

    def _make_room(self, request: Request, draft: Draft) -> bool:
        """A block for the next position, if need be the victim's.  False: not in this step."""
        while not self._cache.grow(request.table, request.computed + 1):
            draft.short = True
            if self._leaving:  # their blocks are free when the step in flight is answered
                return False
            victim = self._victim()
            self._preempt(victim)
            draft.drop(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> Request:
        """Who gives up its blocks: a stalled request, else the last of the client with the most slots.  Where no client
        has two, the last of all: so the first of all always gets on."""
        most = max(self.shares.running.values())
        last: Request | None = None
        for request in reversed(self._running):
            if self._holds_still(request):
                return request
            if last is None and (most == 1 or self.shares.running[request.share] == most):
                last = request
        assert last is not None
        return last

    def _displace(self) -> bool:
        """Preempt for waiting requests that find no slot, or no blocks: stalled requests, and those of clients with
        more slots than the one that waits.  Whether any was preempted."""
        if self.barrier is not None and self._parked:
            for request in self._parked:
                self._waiting.add(request)
            self._parked.clear()
        contested = len(self.shares.present) > 1 or self._stalled
        if not contested or not self._waiting or (self._num_open and not self._short):
            return False
        room = 0 if self._short else self._num_open + len(self._leaving)
        most = room + (1 if self._short else DISPLACED)  # blocks: one after the other, until there are enough
        running = self.shares.running.copy()
        before = self.counters.displaced
        for place, request in enumerate(list(islice(filter(self._may_enter, self._waiting), most))):
            if place >= room:
                victim = self._to_displace(request, running)
                if victim is None:
                    break
                self._preempt(victim)
                self.counters.displaced += 1
                running[victim.share] -= 1
            running[request.share] += 1
        return self.counters.displaced > before

    def _to_displace(self, waiting: Request, running: Mapping[str, int]) -> Request | None:
        """Whose slot and blocks a waiting request may have; `running`: slots by client."""
        level = self._policy(waiting)[0]
        heavy = max(running, key=lambda share: running[share], default="")
        owed = running.get(heavy, 0) > running.get(waiting.share, 0) + 1
        last: Request | None = None
        for request in reversed(self._running):
            if self._holds_still(request):
                return request
            if last is None and owed and request.share == heavy and self._policy(request)[0] >= level:
                last = request
        return last

    def _may_enter(self, request: Request) -> bool:
        """Neither the barrier, nor its grammar or mask, nor a prefix on its way, nor its client keeps it waiting."""
        if self.barrier is not None and request.number >= self.barrier:
            return False
        stalled = request.stalled and self.barrier is None
        return request.may_draw and not stalled and not self._cache.must_wait(request.table)

    def preempt_all(self) -> None:
        """Take slots and blocks from all running requests; no step may be in flight."""
        for request in list(self._running):
            self._preempt(request)

    def _stop_running(self, request: Request) -> None:
        self._running.remove(request)
        self.shares.left(request)

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        self._stop_running(request)
        request.state = State.LEAVING
        self._leave(request)

    def _admit(self, draft: Draft, now: float) -> None:
        """Waiting requests in order, while slots, budget and blocks last.  One whose prefix is being computed for
        another, whose grammar or mask is not there yet, or that is behind the barrier, is passed over; one that does
        not fit holds up those behind it.

        No more requests run than tokens fit in a step, so each gets on.
        """
        order = self._waiting.order()
        while draft.budget and self._num_open > 0 and not draft.short:
            request = next(order, None)
            if request is None:
                break
            hits = None
            if self._may_enter(request):
                usable = request.reusable_blocks(self._cache.block_size)
                hits = self._cache.find(request.table, request.tokens, usable)
            if hits is None:
                self._deferred += 1
            elif self._cache.admit(request.table, request.tokens, hits, spare=len(self._running)):
                self._enter(request, hits, now)
                draft.new.append(request.new_row())
                draft.add(request, self._chunk(request, draft.budget))
            else:
                draft.short = True

    def _enter(self, request: Request, hits: int, now: float) -> None:
        self._waiting.remove(request)
        self._running.add(request)
        self.shares.entered(request)
        request.state = State.RUNNING
        request.slot = self._free_slots.pop()
        request.computed = min(hits * self._cache.block_size, request.reusable)
        if request.cached is None:
            request.cached = request.computed
            request.admitted = now
            self._limits.left(request.prompt_len, now)
            self.counters.prompt_tokens += request.prompt_len
            if self._cache.enabled:
                self.counters.prefix_queries += request.prompt_len
                self.counters.prefix_hits += request.computed

    def _plan(self, draft: Draft) -> StepPlan:
        plan = draft.plan(self._step, self._done)
        self._flights.append(Flight(self._step, draft.rows, self.weight_version))
        self._step += 1
        self._done = []
        return plan

    # --- result ---

    def update(self, result: StepResult, now: float) -> list[Request]:
        """Take the result of the oldest plan; returns the requests that have output to send."""
        flight = self._flights.popleft()
        if flight.step != result.step:
            raise RuntimeError(f"step {result.step} was answered, but step {flight.step} is the oldest in flight")
        self.counters.steps += 1
        tokens, finite = result.token_ids.tolist(), result.finite.tolist()
        logprobs = None if result.logprobs is None else PackedRows(result.logprobs)
        scores = result.prompt_logprobs
        told = []
        drawn = 0  # rows with `samples` so far
        for index, row in enumerate(flight.rows):
            request = row.request
            request.in_flight -= 1
            if request.state is not State.ENDED:  # else it is surplus: its end was found after this plan was made
                if scores and index in scores:
                    request.add_prompt_rows(row.start, scores[index])
                if row.samples:
                    request.pending -= 1
                    if finite[drawn]:
                        self.counters.output_tokens += 1
                        request.append(tokens[drawn], logprobs, drawn, flight.weight_version, now)
                    else:
                        self._fail(request, result.forbidden is not None and bool(result.forbidden[drawn]), now)
                self._cache.settle(request.table, request.tokens, row.start + row.count)
                if request.finish is not None:
                    self.drop(request)
                if request.has_output:
                    told.append(request)
            if request in self._leaving:
                self._leave(request)
            drawn += row.samples
        return told

    def _fail(self, request: Request, forbidden: bool, now: float) -> None:
        """There was nothing to draw from, by the request's own doing or the model's."""
        if forbidden:
            message = "what the sampling_params forbid and allow leaves no token to draw"
            return request.end("error", "forbidden", now, message=f"{message} after {request.num_output}")
        self.counters.nan_requests += 1
        request.end("error", "nan", now, message="the model's logits are not finite")

    def _leave(self, request: Request) -> None:
        """Free slot and blocks, now or when the last step in flight that mentions it is answered."""
        if request.in_flight:
            self._leaving.add(request)
            return
        self._leaving.discard(request)
        self._cache.free(request.table)
        self._free_slots.append(request.slot)
        self._done.append(request.slot)
        request.slot = -1
        request.computed = request.blocks_sent = 0
        request.drawn = False
        if request.state is State.LEAVING:
            request.state = State.WAITING
            if request.stalled:
                self._parked.add(request)
            else:
                self._waiting.add(request)
