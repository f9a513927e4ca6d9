"""Which requests wait, which run, and which slot each has; `Scheduler` plans their steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from tokserve.config import SchedulerConfig
from tokserve.engine.counters import Counters, WeightEpochs
from tokserve.engine.hooks import Hooks
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.queue import POLICIES, Excess, Queue, QueueLimits
from tokserve.engine.request import Request, State
from tokserve.engine.sharing import Sharing
from tokserve.engine.variant import Variant
from tokserve.protocol.messages import StepStats


class RequestSlots:
    """All requests that have not ended, and the slots.

    A request waits, runs in a slot, is preempted and waits again, and ends.  A slot and its blocks are free when no
    step in flight mentions them.  A request that is stalled gets no tokens; it keeps its slot and its blocks until
    another request needs them.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache, weight_version: str) -> None:
        self.weights = WeightEpochs(weight_version)
        self.counters = Counters()
        self._config = config
        self._cache = cache
        self._hooks = Hooks()
        policy = POLICIES[config.scheduling_policy]
        self._sharing = Sharing(policy)
        self._waiting = self._sharing.waiting
        self._parked: set[Request] = set()  # stalled, and without a slot
        self._stalled: set[Request] = set()
        self._limits = QueueLimits(config.max_queued_requests, config.max_queued_tokens)
        self._short = False  # blocks were missing when the last plan was made, so a free slot may mean nothing
        self._deferred = 0  # waiting requests that the last plan passed over
        self.running = Queue(policy)
        self._free_slots = list(range(config.rows - 1, -1, -1))  # a stack
        self._freed: list[int] = []  # slots freed since the last plan
        self._leaving: set[Request] = set()  # have a slot until a step in flight is answered

    def share_by(self, sharing: Sharing) -> None:
        """Divide slots and tokens so, from the first request on."""
        assert not len(self._waiting), "requests wait already"
        self._sharing, self._waiting = sharing, sharing.waiting

    def use(self, hooks: Hooks) -> None:
        """Ask these features from here on."""
        self._hooks = hooks

    @property
    def token_budget(self) -> int:
        """The most tokens of a step."""
        return self._config.token_budget

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._waiting) + len(self._parked)

    @property
    def num_running(self) -> int:
        """Requests with a slot that are scheduled."""
        return len(self.running)

    @property
    def num_stalled(self) -> int:
        """Requests whose client does not read."""
        return len(self._stalled)

    @property
    def _num_open(self) -> int:
        """Requests that may be admitted now: no more run than there are slots, and tokens in a step."""
        return min(len(self._free_slots), self._config.token_budget - len(self.running))

    def unreleased(self) -> list[Request]:
        """Ended requests that steps in flight mention, so their slots and blocks are not free yet."""
        return [request for request in self._leaving if request.state is State.ENDED]

    def stats(self) -> StepStats:
        """Gauges and counters of this moment."""
        pool = self._cache.pool
        return StepStats(
            running=len(self.running),
            waiting=self.num_waiting,
            blocks_held=pool.num_in_use,
            blocks_cached=pool.num_cached,
            blocks_total=pool.total,
            deferred=min(self._deferred, len(self._waiting)) + len(self._parked),
            stalled=len(self._stalled),
            **self.counters.values(),
            rooms={name: value for stats in self._hooks.stats for name, value in stats().items()},
        )

    def excess(self, lengths: Sequence[int], now: float) -> Excess | None:
        """Why new requests with prompts of these lengths may not wait, if so.  Requests that will have a free slot with
        the next plan do not wait."""
        if not self._limits.active:
            return None
        slots = 0 if self._short else len(self._free_slots)
        next_lengths = [
            request.prompt_len for request in islice(self._waiting, slots) if request.history.admitted is None
        ]
        return self._limits.excess(lengths, [*next_lengths, *lengths][:slots], now)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._waiting.add(request)
        self._sharing.added(request)
        self._limits.added(request.prompt_len)

    def stall(self, request: Request, stalled: bool) -> None:
        """Its client does not read what it was sent, or reads again."""
        request.stalled = stalled
        if stalled:
            self._stalled.add(request)
            return
        self._stalled.discard(request)
        if request in self._parked:
            self._parked.remove(request)
            self._waiting.add(request)

    def drop(self, request: Request) -> None:
        """A request that has a `finish` stops here; slot and blocks follow when no step in flight mentions it."""
        if request in self._parked:
            self._parked.remove(request)
        elif request.state is State.WAITING:
            self._waiting.remove(request)
            if request.history.admitted is None:
                self._limits.left(request.prompt_len)
        elif request.state is State.RUNNING:
            self._stop_running(request)
        self._stalled.discard(request)
        self._sharing.ended(request)
        self.weights.count_ages(request, self.counters.tokens_by_age)
        self.counters.preemptions_by_request.add(request.history.num_preemptions)
        for on_end in self._hooks.on_end:
            on_end(request)
        request.state = State.ENDED
        if request.slot >= 0:
            self._release_slot(request)

    def _assign_slot(self, request: Request, computed: int, now: float) -> None:
        self._waiting.remove(request)
        self.running.add(request)
        self._sharing.admitted(request)
        request.state = State.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed = request.num_settled = computed
        if request.history.cached_tokens is None:
            request.history.cached_tokens = request.num_computed
            request.history.admitted = now
            self._limits.admitted(request.prompt_len, now)
            self.counters.prompt_tokens += request.prompt_len
            if self._cache.enabled:
                self.counters.prefix_queries += request.prompt_len
                self.counters.prefix_hits += request.num_computed

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._sharing.left(request)

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        request.history.num_preemptions += 1
        self._stop_running(request)
        request.state = State.LEAVING
        self._release_slot(request)

    def preempt_all(self) -> None:
        """Take slots and blocks from all running requests; no step may be in flight."""
        for request in list(self.running):
            self._preempt(request)

    def restart_prompts(self, variant: Variant | None = None) -> None:
        """All weights, or the variant's, are other ones from this step boundary on: compute again what is begun of a
        vector, or of a prompt's logprobs, as those that both have made are of neither."""
        for request in [*self.running, *self._waiting, *self._parked]:
            if variant in (None, request.variant) and request.restart_prompt() and request.state is State.RUNNING:
                self._preempt(request)

    def _release_slot(self, request: Request) -> None:
        """Free slot and blocks, now or when the last step in flight that mentions it is answered."""
        if request.steps_in_flight:
            self._leaving.add(request)
            return
        self._leaving.discard(request)
        self._cache.free(request.table)
        self._free_slots.append(request.slot)
        self._freed.append(request.slot)
        request.slot = -1
        request.num_computed = request.num_settled = request.table.num_sent = 0
        request.is_decoding = False
        if request.state is State.LEAVING:
            request.output.forget_kv(request.num_output)
            request.state = State.WAITING
            if request.stalled:
                self._parked.add(request)
            else:
                self._waiting.add(request)
