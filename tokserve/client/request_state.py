"""`RequestState`: the front end's state of a request in flight.

A `ChoiceState` turns what the engine sends for one choice into `ChoiceOutput` deltas (text, stop strings, the end), and
merges what the consumer has not taken yet into one delta.  `RequestState` holds the choices of one request, the
engine's admission result, and the consumer that waits for new output.  Nothing is sent from here: `ChoiceState.accept`
only says when the engine must end a choice.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from tokserve.base.errors import RequestError
from tokserve.client.outputs import TERMINATORS, ChoiceOutput, join_columns
from tokserve.protocol.column_table import column_specs, value_specs
from tokserve.protocol.columns import PROMPT_LOGPROBS, Column
from tokserve.protocol.messages import EngineRequest, Finish, RareFields
from tokserve.protocol.prompt import TokenPrompt
from tokserve.text.detokenizer import Detokenizer, StopHit

COUNTERS = {name: spec.count for name, spec in column_specs().items() if spec.count is not None}
CHOICE_WORK = 64  # of a choice's output, in tokens of a prompt: its length is not known


class DeliveryRules(msgspec.Struct, frozen=True):
    """How a choice's output is handed out.  `stream`: as it comes, else once, at the end.  `text`: deltas carry text.
    `keep_stop`: the stop string or token is part of the text."""

    stream: bool = True
    text: bool = False
    keep_stop: bool = False


class ChoiceState:
    """What one engine request has received.  `awaits_scores`: the prompt's logprobs come from the first choice of the
    request, with the first delta; until they are there, nothing is handed out."""

    __slots__ = (
        "_cached_tokens",
        "_columns",
        "_counts",
        "_detokenizer",
        "_finish",
        "_num_tokens",
        "_prompt_weight_versions",
        "_rules",
        "_stop_hit",
        "_texts",
        "_token_ids",
        "_values",
        "_weight_versions",
        "awaits_scores",
        "finished",
        "index",
        "queued",
        "request_id",
        "request_reference",
        "scored",
    )

    def __init__(
        self,
        index: int,
        request_id: str,
        rules: DeliveryRules,
        detokenizer: Detokenizer | None = None,
        *,
        awaits_scores: bool = False,
    ) -> None:
        self.index = index
        self.request_id = request_id  # the engine's
        self.request_reference: weakref.ref[RequestState]  # not a cycle: there may be thousands of choices
        self.awaits_scores = awaits_scores
        self.scored = False  # the prompt's logprobs have come, or will not
        self.finished = False
        self.queued = False  # in the request's queue of choices with something to take
        self._rules = rules
        self._detokenizer = detokenizer
        self._stop_hit: StopHit | None = None
        self._finish: Finish | None = None
        self._weight_versions: list[tuple[str, int, int]] = []
        self._prompt_weight_versions: list[tuple[str, int, int]] = []
        self._num_tokens = 0
        self._token_ids: list[int] = []  # this and below: accepted, not yet taken
        self._texts: list[str] = []
        self._columns: list[dict[str, Column]] = []
        self._values: dict[str, Any] = {}
        self._counts: dict[str, int] = {}  # of all tokens so far
        self._cached_tokens = 0

    @property
    def request(self) -> RequestState:
        """The request that it is a choice of, while that is in use."""
        request = self.request_reference()
        assert request is not None
        return request

    def accept(self, token_ids: list[int], columns: dict[str, Column], rare: RareFields | None) -> bool:
        """Accept a row of a step.  True: a stop string ended the choice, and the engine must end it.  The choice is
        finished only by the engine's last output of the request, which brings times and weight versions."""
        finish = rare.finish if rare is not None else None
        stopped = False
        if self._detokenizer is not None:
            if self._stop_hit is None:
                stopped = self._accept_text(self._detokenizer, token_ids, columns, finish) and finish is None
        else:
            self._accept_tokens(token_ids, columns)
        if rare is not None:
            self._accept_rare(rare)
        return stopped

    def _accept_tokens(self, token_ids: list[int], columns: dict[str, Column]) -> None:
        self._token_ids += token_ids
        self._num_tokens += len(token_ids)
        if columns:
            self._columns.append(columns)
            for name, count in COUNTERS.items():
                if name in columns:
                    self._counts[name] = self._counts.get(name, 0) + count(columns[name])

    def _accept_text(
        self, detokenizer: Detokenizer, token_ids: list[int], columns: dict[str, Column], finish: Finish | None
    ) -> bool:
        """Accept tokens with their columns, and text, up to a stop string; True if there is one."""
        is_terminated = finish is not None and finish.detail in TERMINATORS and not self._rules.keep_stop
        text, hit = detokenizer.push(token_ids[:-1] if is_terminated else token_ids, finish is not None)
        if text:
            self._texts.append(text)
        if hit is not None:
            count = hit.index + 1 - self._num_tokens
            self._stop_hit = hit
            token_ids = token_ids[:count]
            columns = {name: column.part(0, count) for name, column in columns.items()}
        self._accept_tokens(token_ids, columns)
        return hit is not None

    def _accept_rare(self, rare: RareFields) -> None:
        if rare.values:
            num_tokens, specs = self.request.prompt_len + self._num_tokens, value_specs()
            self._values |= {name: specs[name].read(value, num_tokens) for name, value in rare.values.items()}
            self.scored = self.scored or PROMPT_LOGPROBS in rare.values
        if rare.cached_tokens:
            self._cached_tokens = rare.cached_tokens
        if rare.finish is not None:
            self._finish = rare.finish
            self._weight_versions = rare.weight_versions
            self._prompt_weight_versions = rare.prompt_weight_versions
            self.finished = self.scored = True

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return not self.awaits_scores and (self.finished or (self._rules.stream and self._stop_hit is None))

    def share_scores(self, others: Sequence[ChoiceState]) -> list[ChoiceState]:
        """Give the prompt's logprobs to the choices that await them; returns those of them that have outputs."""
        for other in others:
            other.awaits_scores = False
            if PROMPT_LOGPROBS in self._values:
                other._values[PROMPT_LOGPROBS] = self._values[PROMPT_LOGPROBS]
        return [other for other in others if other.finished or other._num_tokens]

    def take(self) -> ChoiceOutput:
        """Everything since the last call, as one delta."""
        columns = self._columns
        delta = ChoiceOutput(
            self.index,
            self._token_ids,
            "".join(self._texts) if self._rules.text else None,
            join_columns(columns) if columns else {},
            self._cached_tokens,
        )
        self._token_ids = []
        self._texts = []
        self._columns = []
        self._cached_tokens = 0
        if self._values:
            delta.values, self._values = self._values, {}
        if self._finish is not None:
            self._describe_end(delta, self._finish)
        return delta

    def _describe_end(self, delta: ChoiceOutput, finish: Finish) -> None:
        delta.finish_reason, delta.stop_detail, delta.message = finish.reason, finish.detail, finish.message
        delta.stop_reason = finish.stop
        delta.times = finish.queued, finish.first_token, finish.total
        delta.counts = self._counts
        count = self._num_tokens
        delta.weight_versions = [
            (version, start, min(end, count)) for version, start, end in self._weight_versions if start < max(count, 1)
        ]
        delta.prompt_weight_versions = self._prompt_weight_versions
        if self._stop_hit is not None:
            delta.finish_reason, delta.stop_detail, delta.stop_reason = "stop", "stop_string", self._stop_hit.text
            delta.message = None


class RequestState:
    """A checked request of one prompt, from before it is sent to its end.

    `request_id`: as the client gave it.  `engine_requests`: what is to be sent, one per choice; empty once it is sent.
    `work`: how much it is, in tokens of a prompt, about.
    `admission`: the error of a refusal or None; one future for all requests of a submission.  The consumer either sets
    a callback for the request's lifetime (`listen`) or waits in `next_delta`.
    """

    def __init__(
        self,
        request_id: str,
        prompt: TokenPrompt,
        seed: int,
        choices: Sequence[ChoiceState],
        engine_requests: Sequence[EngineRequest] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt = TokenPrompt(prompt.ids)  # without the data of features
        self.placeholders = [(feature.start, feature.length) for feature in prompt.features]
        self.prompt_len = len(prompt.ids) // 4
        self.work = self.prompt_len + CHOICE_WORK * len(choices)
        self.seed = seed
        self.choices = choices
        self.engine_requests = engine_requests
        self.arrival = engine_requests[0].arrival if engine_requests else 0.0
        self.num_open = len(choices)
        self.admission: asyncio.Future[RequestError | None]
        self._awaiting_scores = [choice for choice in choices if choice.awaits_scores]
        self._queue: deque[ChoiceState] = deque()  # choices with something to take
        self._listener: Callable[[], None] | None = None
        self._error: RequestError | None = None
        reference = weakref.ref(self)
        for choice in choices:
            choice.request_reference = reference

    def open_ids(self) -> list[str]:
        """The engine's ids of the choices that have not ended."""
        return [choice.request_id for choice in self.choices if not choice.finished]

    def enqueue(self, choice: ChoiceState) -> bool:
        """`choice` has accepted an output.  True: there is something new to take, so `notify` must be called."""
        is_new = False
        if self._awaiting_scores and choice is self.choices[0] and choice.scored:
            others, self._awaiting_scores = self._awaiting_scores, []
            for other in choice.share_scores(others):
                is_new |= self.enqueue(other)
        if choice.queued or not choice.ready:
            return is_new
        choice.queued = True
        self._queue.append(choice)
        return True

    def fail(self, error: RequestError) -> None:
        """End the request with an error; nothing more will come."""
        self._error = error
        self.notify()

    def abandon(self) -> None:
        """The request is given up: its consumer sees the end."""
        self.num_open = 0
        self.notify()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` in the event loop's thread whenever there is something new to `take`, an error included.
        It must not raise.  None removes it."""
        if listener is not None and self._listener is not None:
            raise RuntimeError("a stream has one consumer at a time")
        self._listener = listener

    def notify(self) -> None:
        """Call the consumer, if there is one."""
        if self._listener is not None:
            self._listener()

    @property
    def ended(self) -> bool:
        """Whether all choices have ended, and their last deltas are taken."""
        return self.num_open == 0 and not self._queue

    def take(self) -> Iterator[ChoiceOutput]:
        """The deltas available now; after them, raises the request's error, if any."""
        queue = self._queue
        while queue:
            choice = queue.popleft()
            choice.queued = False
            yield choice.take()
        if self._error is not None:
            raise self._error.again()

    async def next_delta(self) -> ChoiceOutput | None:
        """The next delta of any choice; None when all have ended.  Raises the request's error."""
        while True:
            delta = next(self.take(), None)
            if delta is not None or self.ended:
                return delta
            has_output = asyncio.Event()
            self.listen(has_output.set)
            try:
                await has_output.wait()
            finally:
                self.listen(None)
