"""The engine's state of one request: its tokens, how far they are computed, its blocks and its slot.

    0 ........ prompt_len ........ len(tokens) ........ num_tokens
    |  prompt  |   known output    |  sampled by steps in flight |
    |  num_settled  |  computed by steps in flight  | num_computed

When it stops is in `stopping`, what it has yet to send in `output_buffer`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tokserve.base.errors import RequestError
from tokserve.engine.kv_cache.block_table import BlockTable
from tokserve.engine.output.columns import StepColumns, StepRows
from tokserve.engine.output.output_buffer import Limits, OutputBuffer
from tokserve.engine.stopping import StopChecker
from tokserve.engine.variant import Variant
from tokserve.protocol.images import KIND
from tokserve.protocol.messages import EngineRequest, Finish
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.protocol.plan import NO_LEGAL_TOKEN, NOT_FINITE, NewRow
from tokserve.protocol.prompt import Feature, check_features

RESTRICTIONS = {  # of `SamplingParams`: the fields that exclude tokens, as an error names them
    "structured_outputs": "structured_outputs",
    "allowed_token_ids": "allowed_token_ids",
    "bad_token_ids": "bad_token_ids",
    "bad_token_sequences": "bad_token_sequences (bad_words)",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "logit_bias": "logit_bias",
    "min_tokens": "min_tokens",
    "thinking_token_budget": "thinking_token_budget",
}


class Gate(NamedTuple):
    """What a feature may keep a request waiting for; `name`: what operators see."""

    name: str
    is_open: Callable[[], bool]


class State(enum.Enum):
    """WAITING: no slot.  RUNNING: has a slot, is scheduled.  LEAVING: preempted, but a step in flight still
    mentions it.  ENDED: has a `finish`, and holds its slot only as long as a step in flight mentions it."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class RequestHistory:
    """What is reported of a request: when it came, by the front end's clock (`arrival`, for order only) and by the
    engine's (`received`), when it first got a slot and a token, the tokens of its prompt that were cached then, and how
    often it has lost its slot."""

    arrival: float
    received: float
    admitted: float | None = None
    first_token: float | None = None
    cached_tokens: int | None = None
    num_preemptions: int = 0


class Request:
    """One choice.  Positions are counted from the start of the prompt.

    `number`: in order of receipt.  `limit`: tokens of prompt and output together.
    """

    __slots__ = (
        "client",
        "finish",
        "gates",
        "history",
        "is_decoding",
        "joint",
        "last_step",
        "least_computed",
        "limit",
        "listeners",
        "num_computed",
        "num_in_flight",
        "num_settled",
        "number",
        "options",
        "output",
        "owner",
        "prompt_len",
        "prompt_only",
        "request_id",
        "seed",
        "slot",
        "stalled",
        "state",
        "steps_in_flight",
        "stopping",
        "table",
        "task",
        "tokens",
    )

    def __init__(
        self, spec: EngineRequest, *, owner: bytes, number: int, received: float, limits: Limits,
        client: str = "",
    ) -> None:  # fmt: skip
        """Raises RequestError for a request that cannot be served."""
        self.request_id = spec.request_id
        self.options = spec.options
        self.task = task = spec.task
        self.seed = spec.seed
        self.history = RequestHistory(spec.arrival, received)
        self.owner = owner
        self.client = client
        self.number = number
        self.prompt_only = (
            isinstance(task, PoolingParams) or task.max_tokens == 0
        )  # it ends when its prompt is computed
        self.tokens = _prompt(spec.prompt.ids, limits, new_tokens=int(not self.prompt_only))
        self.prompt_len = len(self.tokens)
        self.joint = _joint(spec.prompt.features, limits, self.prompt_len)
        check_features(spec.prompt.features, self.prompt_len, limits.feature_bytes)
        self.table = BlockTable(spec.options.cache_salt or "", None, spec.prompt.features)
        self.output = OutputBuffer(task, self.prompt_len, limits)
        self.stopping: StopChecker | None = None  # of a request that generates
        self.limit = _longest(task, self.prompt_len, limits.context)
        if isinstance(task, SamplingParams):
            self.stopping = StopChecker(task, limits.eos, self.prompt_len, self.limit)
        # set by the scheduler
        self.state = State.WAITING
        self.slot = -1
        self.num_computed = 0  # positions computed, or planned to be; drafts in flight count as accepted
        self.num_settled = 0  # positions whose computation is known to stay
        self.num_in_flight = 0  # tokens that steps in flight sample, at most
        self.steps_in_flight = 0  # steps that mention it
        self.last_step = -1  # the newest step with a row of it
        self.least_computed: int | None = None  # the first position that a feature needs computed, cached or not
        self.is_decoding = False  # a token was planned since it got its slot, so its prompt is computed
        self.stalled = False  # its client does not read what it was sent
        self.gates: tuple[Gate, ...] = ()  # of features: nothing of it is computed unless all are open
        self.listeners: tuple[Callable[[int], object], ...] = ()  # of features: told of every new token
        self.finish: Finish | None = None

    @property
    def is_first_choice(self) -> bool:
        """Whether it is the first of the choices of its prompt."""
        return self.request_id.endswith("#0")

    @property
    def features(self) -> tuple[Feature, ...]:
        """What stands at placeholders of the prompt."""
        return self.table.features

    @property
    def variant(self) -> Variant | None:
        """The weights beside the model's own that compute it."""
        return self.table.variant

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that `min_tokens` keeps from being sampled."""
        return () if self.stopping is None else self.stopping.ids

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, counting those that only the device knows."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_output(self) -> int:
        """The number of known output tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the cache: the last token must be computed to go on, and so must every
        position that a prompt logprob, the pooling or a feature still needs."""
        if isinstance(self.task, PoolingParams) and self.task.pooling != "last":
            return 0
        reusable = len(self.tokens) - 1
        if self.output.next_prompt_row < self.prompt_len:
            reusable = min(reusable, self.output.next_prompt_row - 1)
        return reusable if self.least_computed is None else min(reusable, self.least_computed)

    def reusable_blocks(self, block_size: int) -> int:
        """Full blocks that may come from the cache.  One may reach past `reusable` by the last token: that
        position is then computed again, to the same bits."""
        reusable = self.reusable
        return (len(self.tokens) if reusable == len(self.tokens) - 1 else reusable) // block_size

    def without_cuts(self, computed: int, count: int, most: int) -> int:
        """Tokens of a step that goes on from `computed`: `count`, but none of a joint image without the rest of it.
        An image that comes next is computed whole if that takes up to `most`; else 0."""
        for first, last in self.joint:
            if first < computed + count < last:
                if computed < first:
                    return first - computed
                return last - computed if last - computed <= most else 0
        return count

    @property
    def is_held(self) -> bool:
        """Whether a feature keeps it from being computed."""
        return not all([gate.is_open() for gate in self.gates])

    @property
    def released(self) -> bool:
        """Whether it has ended, and its slot and blocks are free."""
        return self.state is State.ENDED and self.slot < 0

    @property
    def spans(self) -> list[tuple[str, str, int, int]]:
        """(weight version, variant's label or "", start, end) of output positions so far."""
        return self.output.spans(self.num_output)

    def new_row(self, fields: dict[str, Any]) -> NewRow:
        """What the device must know when the request enters its slot; `fields`: what features add to it."""
        return NewRow(
            slot=self.slot,
            request_id=self.request_id,
            tokens=np.array(self.tokens, dtype=np.int32),
            prompt_len=self.prompt_len,
            task=self.task,
            seed=self.seed,
            stop_ids=self.stop_ids,
            features=self.features,
            columns=self.output.columns,
            **fields,
        )

    def be_computed_by(self, variant: Variant) -> None:
        """Other weights than the model's own compute it, from its first token on."""
        self.table.variant = variant

    def on_computed(self, version: str, count: int = 1, rejected: int = 0) -> None:
        """A step with these weights computed `count` positions, the last of which, `rejected`, do not stay."""
        if count > rejected and (version != self.output.version or self.table.variant is not None):
            self.output.set_version(version, self.table.variant, self.num_output, self.num_settled)
        self.num_settled += count

    def append(self, tokens: Sequence[int], columns: Mapping[str, StepRows], first_row: int, now: float) -> int:
        """New tokens, which are rows `first_row` ... of the step's columns; returns how many are kept.  Sets `finish`
        at a stop, and drops the tokens after it."""
        assert self.stopping is not None
        if self.history.first_token is None:
            self.history.first_token = now
        known, stopping = self.tokens, self.stopping
        kept = 0
        for token in tokens:
            known.append(token)
            kept += 1
            if self.listeners:
                for listen in self.listeners:
                    listen(token)
            if stopping.always or token in stopping.candidates or len(known) >= stopping.limit:
                stop = stopping.check(known)
                if stop is not None:
                    self.end(stop.reason, stop.detail, now, stop=stop.stop)
                    break
        if columns:
            self.output.add_rows(columns, first_row, kept)
        return kept

    def roll_back(self, rejected: int) -> None:
        """The last positions of a step do not stay: drafts, or one whose token was withheld."""
        self.num_computed -= rejected
        self.num_settled -= rejected

    def on_prompt_computed(self, now: float) -> None:
        """The prompt of a request that has no output is computed, and with it the vector of one that pools."""
        rows = self.output.prompt_rows
        if isinstance(self.task, PoolingParams):
            self.end("stop", "pooled", now)
        elif rows is not None and not rows.is_finite:
            self.on_status(NOT_FINITE, now)
        else:
            self.history.first_token = now  # the time that the prompt took
            self.end("length", "max_tokens", now)

    def on_status(self, status: int, now: float) -> None:
        """No token was sampled: by the request's own doing, by the model's, or because a feature withheld it."""
        if status == NO_LEGAL_TOKEN:
            labels = [label for name, label in RESTRICTIONS.items() if getattr(self.task, name)]
            message = f"no token may be sampled after {self.num_output} output tokens: all are excluded"
            self.end("error", "forbidden", now, message=message + (f" by {', '.join(labels)}" if labels else ""))
        elif status == NOT_FINITE:
            self.end("error", "nan", now, message="the model's logits are not finite")

    def end(
        self, reason: str, detail: str, now: float, *, stop: int | list[int] | None = None, message: str | None = None
    ) -> None:
        """Set `finish`."""
        history = self.history

        def since(moment: float | None) -> float:
            return 0.0 if moment is None else moment - history.received

        self.output.num_computed = self.prompt_len if self.num_output else min(self.num_settled, self.prompt_len)
        self.finish = Finish(
            reason, detail, stop, message, since(history.admitted), since(history.first_token), since(now)
        )

    def restart_prompt(self) -> bool:
        """Other weights serve: drop what is known of its prompt's logprobs, unless it has output already; whether its
        prompt is computed for those, or for a vector."""
        if self.num_output:
            return False
        if self.output.prompt_rows is not None:
            self.output.prompt_rows.restart()
            return True
        return isinstance(self.task, PoolingParams)

    def emit(self, columns: StepColumns) -> None:
        """Add what is new since the last call to a step's columns."""
        self.output.emit(columns, self.request_id, self.tokens, self.finish, self.history.cached_tokens or 0)


def _joint(features: Sequence[Feature], limits: Limits, prompt_len: int) -> tuple[tuple[int, int], ...]:
    """First position, and the one after the last, of the whole prompt, or of each image, whose tokens one step computes
    together."""
    if limits.whole_prompts:
        return ((0, prompt_len),)
    if limits.images is None or not limits.images.bidirectional:
        return ()
    return tuple((one.start, one.start + one.length) for one in features if one.kind == KIND)


def _longest(task: SamplingParams | PoolingParams, prompt_len: int, context: int) -> int:
    """Tokens that prompt and output may have together."""
    if not isinstance(task, SamplingParams):
        return prompt_len
    return context if task.max_tokens is None else min(context, prompt_len + task.max_tokens)


def _prompt(packed: bytes, limits: Limits, new_tokens: int) -> array[int]:
    if not packed or len(packed) % 4:
        raise RequestError("the prompt must be a sequence of at least one packed int32 token id")
    ids = np.frombuffer(packed, dtype="<i4")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocab_size:
        unknown = low if low < 0 else high
        raise RequestError(f"token id {unknown} of the prompt is not in the vocabulary of {limits.vocab_size}")
    if len(ids) + new_tokens > limits.context:
        problem = "and one new token do not fit" if new_tokens else "does not fit"
        raise RequestError(
            f"the prompt of {len(ids)} tokens {problem}: prompt and output together can have at "
            f"most {limits.context} tokens (the context of the model, or the whole KV cache if that is smaller)"
        )
    return array("i", packed)
