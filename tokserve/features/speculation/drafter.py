"""Where drafts come from: a `Drafter` proposes the next tokens of requests, and a step verifies them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tokserve.base.errors import Conflict, RequestError
from tokserve.config import SpeculationPlan
from tokserve.engine.admin.command import command
from tokserve.engine.request import Request
from tokserve.features.speculation.draft_budget import StepCosts, choose
from tokserve.features.speculation.draft_history import DraftHistory, GroupKey
from tokserve.features.speculation.draft_state import Corpus, DraftState
from tokserve.features.speculation.drawn import DrawnDrafts
from tokserve.features.speculation.token_index import MAX_MATCH, PAIR, TokenIndex
from tokserve.protocol.plan import DRAWN, DraftPasses

PREDICTION_TRUST = 4  # tokens in a row that a prediction counts as having been right, at its start


class Drafter(Protocol):
    """Proposes drafts on the host; called by the scheduler while it plans, so it must be quick."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> Sequence[Sequence[int]]:
        """Propose for each request at most its limit of ids of the vocabulary that may follow its tokens; [] for none;
        or as many DRAWN, which the device draws.

        A request's `num_in_flight` tokens are not known yet, and come before the drafts.  `num_tokens`: of the step
        without drafts.
        """

    def source(self, request: Request) -> str:
        """Where the drafts come from that were proposed last for a request, for reports."""

    def expect(self, request: Request, prediction: TokenIndex) -> None:
        """The client expects these tokens."""

    def on_step(self, rows: int, num_tokens: int, seconds: float) -> None:
        """A step in which every token was sampled from has taken so long."""

    def on_drawn(self, draft_passes: DraftPasses, rows: int) -> None:
        """The device has drawn drafts for so many rows of a step."""

    def on_verified(self, request: Request, proposed: int, accepted: int) -> None:
        """Drafts that the device drew for a request were verified."""

    def on_end(self, request: Request) -> None:
        """A request has ended."""


class TextDrafter:
    """Drafts from texts that are there: predictions, the request's own tokens, and earlier outputs of its group; and,
    where they have none, drafts that the device draws, if it can."""

    def __init__(self, plan: SpeculationPlan, vocab_size: int) -> None:
        self.history = DraftHistory(plan.history_bytes)
        self._max_drafts = plan.num_drafts
        self._vocab_size = vocab_size
        self._searches = plan.method != "prediction"
        self._costs = StepCosts()
        self._states: dict[Request, DraftState] = {}
        self._predictions: dict[Request, TokenIndex] = {}
        self._drawn = None
        if plan.draws:
            self._drawn = DrawnDrafts(plan.num_drafts, computes_prompts=plan.method == "draft_model")

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> Sequence[Sequence[int]]:
        states: list[DraftState] = []
        likely: list[list[float]] = []
        for request, limit in zip(requests, limits, strict=True):
            state = self._states.get(request)
            if state is None:
                state = self._states[request] = self._state(request)
            state.advance()
            states.append(state)
            likely.append(state.probabilities(request.num_in_flight, min(limit, self._max_drafts)))
        counts = [0] * len(requests)
        if any(likely):
            counts = choose(likely, len(requests), num_tokens, max(limits), self._costs)
        drafts: list[Sequence[int]] = [
            state.drafts(request.num_in_flight, count) if count else ()
            for request, state, count in zip(requests, states, counts, strict=True)
        ]
        if self._drawn is not None:
            gains = [sum(line[:count]) for line, count in zip(likely, counts, strict=True)]
            drawn = self._drawn.choose(requests, limits, gains, counts, num_tokens, self._costs)
            drafts = [[DRAWN] * count if count else ids for count, ids in zip(drawn, drafts, strict=True)]
        return drafts

    def _state(self, request: Request) -> DraftState:
        corpora, start, trust = [], None, 0
        if request in self._predictions:
            prediction = Corpus("prediction", self._predictions[request], expected=True)
            corpora.append(prediction)
            start, trust = (prediction, 0), PREDICTION_TRUST
        context = request.tokens[max(0, request.prompt_len - PAIR) : request.prompt_len]
        outputs = self.history.find(group_of(request), request.seed, context)
        if outputs is not None:
            history, position = outputs
            corpora.append(history)
            if position is not None and start is None:
                start, trust = (Corpus("history", history.index, expected=True), position), MAX_MATCH
        return DraftState(request.tokens, request.prompt_len, corpora, start, trust=trust, searches=self._searches)

    def source(self, request: Request) -> str:
        return self._states[request].source

    def expect(self, request: Request, prediction: TokenIndex) -> None:
        self._predictions[request] = prediction

    def on_step(self, rows: int, num_tokens: int, seconds: float) -> None:
        self._costs.record(rows, num_tokens, seconds)

    def on_drawn(self, draft_passes: DraftPasses, rows: int) -> None:
        if self._drawn is not None:
            self._drawn.on_drawn(draft_passes, rows)

    def on_verified(self, request: Request, proposed: int, accepted: int) -> None:
        if self._drawn is not None:
            self._drawn.on_verified(request, proposed, accepted)

    def on_end(self, request: Request) -> None:
        """Keep the output for later requests of the group."""
        for table in (self._states, self._predictions):
            table.pop(request, None)
        if self._drawn is not None:
            self._drawn.on_end(request)
        if request.num_output and request.options.speculate:
            self.history.add(group_of(request), request.seed, request.tokens[request.prompt_len :])

    @command("add_draft_corpus")
    def add_corpus(self, draft_group: str, token_ids: list[bytes], lora_name: str = "", cache_salt: str = "") -> Any:
        """Keep outputs, packed int32 ids, for the requests of a group.  The reply: how many outputs the group has."""
        for index, packed in enumerate(token_ids):
            ids = np.frombuffer(packed, "<i4")
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._vocab_size):
                field = f"token_ids[{index}]"
                raise RequestError(f"{field} has an id outside the vocabulary of {self._vocab_size}", field=field)
        key = (lora_name, cache_salt, "", _named(draft_group))
        for packed in token_ids:
            self.history.add(key, None, array("i", packed))
        return {"outputs": self.history.count(key)}

    @command("remove_draft_corpus")
    def remove_corpus(self, draft_group: str) -> Any:
        """Drop the outputs of a group, with all adapters and salts.  The reply: how many those were."""
        return {"removed": self.history.remove(_named(draft_group))}


class NoDrafts:
    """The commands of an engine that keeps no drafts."""

    @command("add_draft_corpus")
    def add_corpus(self, **_: Any) -> Any:
        """Refuse the command: there are no drafts."""
        raise Conflict("this server keeps no drafts: it was started with the speculative method none")

    @command("remove_draft_corpus")
    def remove_corpus(self, **_: Any) -> Any:
        """Refuse the command: there are no drafts."""
        self.add_corpus()


def group_of(request: Request) -> GroupKey:
    """Whose outputs are drafts for this request."""
    options = request.options
    salt = options.cache_salt or ""
    if options.draft_group is not None:
        return options.adapter, salt, "", _named(options.draft_group)
    prompt = request.tokens[: request.prompt_len].tobytes()
    return options.adapter, salt, request.client, b"prompt:" + hashlib.blake2b(prompt, digest_size=16).digest()


def _named(group: str) -> bytes:
    return b"group:" + group.encode()


def prediction_index(ids: bytes) -> TokenIndex:
    """Packed int32 ids to be searched."""
    return TokenIndex(array("i", ids))
