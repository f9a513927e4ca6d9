"""How many drafts the device draws for requests whose texts have none: with a draft model, or the quantized model.

Unlike drafts from texts these cost time to make: a pass of the draft model for each position, of all requests that
are drafted for there together.  What passes cost is measured while serving, and so is how often each request's drafts
are right.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokserve.engine.request import Request
from tokserve.features.speculation.draft_budget import MIN_GAIN, StepCosts
from tokserve.features.speculation.draft_state import DrawState
from tokserve.protocol.plan import DraftPasses

MAX_DRAWN = 16  # drafts of a request in a step
PRIOR = 0.7  # the probability of a draft before anything is known
_SHARED_RATE = 0.02  # of a new draft in the moving average of all requests
EXPLORE = 128  # output tokens after which drafts that were not worth it are tried again
TRIED = 2  # drafts of a try
PROMPT_SHARE = 64  # a draft model computes a prompt when the output has the 64th part of its tokens
_GUESS = 0.3  # a pass in steps of one token, before one was measured
_SECONDS_RATE = 0.15
MAX_ADAPTERS = 256  # whose drafts are remembered


class DrawnDrafts:
    """`most`: drafts of a request in a step.  `computes_prompts`: with a model that has a cache of its own."""

    def __init__(self, most: int, *, computes_prompts: bool) -> None:
        self._most = min(most, MAX_DRAWN)
        self._computes_prompts = computes_prompts
        self._rates: dict[str, float] = {}  # by adapter: of all requests
        self._seconds: float | None = None  # of a pass
        self._states: dict[Request, DrawState] = {}

    def state(self, request: Request) -> DrawState:
        """The request's, made at its first use."""
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = DrawState(self._rates.get(request.options.adapter, PRIOR))
        return state

    def on_end(self, request: Request) -> None:
        """Forget a request."""
        self._states.pop(request, None)

    def may_draw(self, request: Request) -> bool:
        """Whether the device can draw for the request now, and it may be worth the work that is missing."""
        if not request.is_decoding or request.features:
            return False
        return not self._computes_prompts or request.num_output * PROMPT_SHARE >= request.prompt_len

    def choose(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        gains: Sequence[float],
        counts: Sequence[int],
        num_tokens: int,
        costs: StepCosts,
    ) -> list[int]:
        """How many drafts to draw for each request; 0: those of its texts are better.

        `gains`: tokens that the `counts` drafts from texts are expected to bring.  `num_tokens`: of the step without
        drafts; the other arguments as in `Drafter.propose`.
        """
        rows, budget = len(requests), max(limits) - sum(counts)
        marginal: list[tuple[float, int, int]] = []  # probability, place, request
        replaced_tokens, replaced_gain = 0, 0.0
        tried: dict[int, int] = {}
        for index, (request, limit) in enumerate(zip(requests, limits, strict=True)):
            most = min(limit, self._most)
            if most < 1 or not self.may_draw(request):
                continue
            state = self.state(request)
            if counts[index] and gains[index] >= _expected(state.rate, min(most, 4)):
                continue
            if request.num_output - state.tried_at >= EXPLORE:
                tried[index] = min(most, TRIED)
            replaced_tokens, replaced_gain = replaced_tokens + counts[index], replaced_gain + gains[index]
            probability = 1.0
            for place in range(most):
                probability *= state.rate
                marginal.append((probability, place, index))
        drawn = [0] * rows
        text_tokens = sum(counts)
        base = costs.relative(rows, num_tokens)
        best = (rows + sum(gains)) / (costs.relative(rows, num_tokens + text_tokens) / base) * MIN_GAIN
        expected = rows + sum(gains) - replaced_gain
        tokens, passes, best_count = num_tokens + text_tokens - replaced_tokens, 0, 0
        marginal.sort(key=lambda entry: (-entry[0], entry[1]))
        step = costs.seconds(rows)
        cost_of_pass = _GUESS if step is None or self._seconds is None else self._seconds / step
        for count, (probability, place, _) in enumerate(marginal[: max(0, budget + replaced_tokens)], 1):
            expected += probability
            passes = max(passes, place + 1)
            rate = expected / (costs.relative(rows, tokens + count) / base + passes * cost_of_pass)
            if rate > best:
                best, best_count = rate, count
        for _, _, index in marginal[:best_count]:
            drawn[index] += 1
        for index, count in tried.items():
            drawn[index] = max(drawn[index], count)
        for index, count in enumerate(drawn):
            if count:
                self.state(requests[index]).tried_at = requests[index].num_output
        return drawn

    def on_drawn(self, draft_passes: DraftPasses, rows: int) -> None:
        """The device has drawn drafts for so many rows."""
        if draft_passes.num_passes == 0 or draft_passes.num_tokens > 2 * rows * draft_passes.num_passes:
            return  # most of it was catching up
        seconds = draft_passes.seconds / draft_passes.num_passes
        known = self._seconds
        self._seconds = seconds if known is None else known + (min(seconds, 4 * known) - known) * _SECONDS_RATE

    def on_verified(self, request: Request, proposed: int, accepted: int) -> None:
        self.state(request).record(proposed, accepted)
        adapter = request.options.adapter
        rate = self._rates.get(adapter, PRIOR)
        for hit in [1.0] * accepted + [0.0] * (accepted < proposed):
            rate += (hit - rate) * _SHARED_RATE
        if len(self._rates) >= MAX_ADAPTERS and adapter not in self._rates:
            self._rates.clear()
        self._rates[adapter] = rate


def _expected(rate: float, count: int) -> float:
    """Tokens that so many drafts bring."""
    total, probability = 0.0, 1.0
    for _ in range(count):
        probability *= rate
        total += probability
    return total
