"""The grammar that the output of one request follows, from its compilation on."""

from __future__ import annotations

from concurrent.futures import Future

from tokserve.engine.request import Request
from tokserve.features.grammar.grammar import Grammar, GrammarState
from tokserve.protocol.params import SamplingParams


class FollowedGrammar:
    """The grammar of one request.  `state`: once it is compiled; `withheld`: a step in flight must not sample."""

    __slots__ = ("_eos_allowed", "future", "request", "state", "withheld")

    def __init__(self, request: Request, future: Future[Grammar]) -> None:
        self.request = request
        self.future = future
        self.state: GrammarState | None = None
        self.withheld = False
        self._eos_allowed = False

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, and the mask of the newest known token is computed."""
        return self.state is not None and not self.withheld and not self.state.pending

    def begin(self) -> None:
        """The grammar is compiled."""
        request = self.request
        assert request.stopping is not None
        self._eos_allowed = any(map(self._may_sample, request.stopping.eos))
        self.state = GrammarState(self.future.result(), ends=self._eos_allowed)
        request.listeners += (self.state.accept,)

    def _may_sample(self, token: int) -> bool:
        """Whether the request's lists of ids allow it."""
        task = self.request.task
        assert isinstance(task, SamplingParams)
        allowed = task.allowed_token_ids is None or token in task.allowed_token_ids
        return allowed and token not in task.bad_token_ids and [token] not in task.bad_token_sequences

    def on_bitmask(self, now: float) -> None:
        """The mask is computed; sets `finish` if nothing may come next."""
        state, request = self.state, self.request
        assert state is not None and isinstance(request.task, SamplingParams)
        if state.error is not None:
            message = f"structured_outputs cannot be followed: {state.error}"
            request.end("error", "grammar_limit" if state.limited else "error", now, message=message)
        elif state.complete and (not self._eos_allowed or request.num_output < request.task.min_tokens):
            request.end("stop", "grammar", now)  # no EOS may come
