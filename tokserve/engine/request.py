"""One generation from `Add` to `Finish`: its tokens, how far they are computed, and when it must stop.

A request knows its own limits and turns what steps bring it into rows of output.  It does not know the scheduler,
the cache's contents or other requests; who sets its state is said at each field.
"""

from __future__ import annotations

import enum
from array import array
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tokserve.engine.adapter import Adapter
from tokserve.engine.cache import Table
from tokserve.engine.columns import LogprobColumns, PackedRows, StepColumns
from tokserve.engine.grammar import Follower, Grammar
from tokserve.engine.repetition import Repetition
from tokserve.errors import RequestError
from tokserve.messages import Add, Finish
from tokserve.plan import LogprobRows, NewRow


class State(enum.Enum):
    """WAITING: no slot.  RUNNING: has a slot, is scheduled.  LEAVING: preempted, but a step in flight still
    mentions it.  ENDED: has a `finish`, and holds its slot only as long as a step in flight mentions it."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the cache set for all requests.  `context`: most tokens of prompt plus output."""

    context: int
    vocab_size: int
    eos: tuple[int, ...]
    logprobs_mode: str


class Request:
    """See the module.  Positions are counted from the start of the prompt.

    `tokens`: prompt and known output.  `pending`: tokens drawn by steps in flight, known to the device only.
    `computed`: positions that are computed or planned to be.  `in_flight`: uncollected steps that mention it.
    """

    # scheduling, set by the scheduler
    state = State.WAITING
    slot = -1
    computed = 0
    pending = 0
    in_flight = 0
    blocks_sent = 0  # entries of the block table that the device has
    drawn = False  # a token has been planned since it got its slot, so its prompt is computed
    stalled = False  # its client does not read what it has already
    grammar: Future[Grammar] | None = None  # until it is there, the request waits for it
    cached: int | None = None  # prompt tokens found in the cache at the first admission
    admitted: float | None = None

    def __init__(
        self, add: Add, owner: bytes, number: int, received: float, limits: Limits, adapter: Adapter | None = None,
        client: str = "", share: str | None = None,
    ) -> None:  # fmt: skip
        """Raises RequestError for a request that cannot be served.  `received`: the engine's clock.  `share`: of whose
        share of the slots it takes one, if not the client's."""
        params = add.sampling
        self.rid = add.rid
        self.owner = owner
        self.client = client
        self.share = client if share is None else share
        self.number = number  # in order of receipt
        self.received = received
        self.arrival = add.arrival  # the front end's clock; for order only
        self.priority = add.priority
        self.params = params
        self.seed = add.seed
        self.hold = add.hold
        self.tokens = _prompt(add.prompt, limits)
        self.prompt_len = len(self.tokens)
        self.limit = min(limits.context, self.prompt_len + (params.max_tokens or limits.context))
        self.adapter = adapter
        self.table = Table(add.salt, adapter)
        self._eos = frozenset(() if params.ignore_eos else limits.eos)
        self._stops = frozenset(params.stop_token_ids)
        self._sequences: dict[int, list[array[int]]] = {}  # by last id
        for sequence in params.stop_token_sequences:
            self._sequences.setdefault(sequence[-1], []).append(array("i", sequence))
        self._enders = self._eos | self._stops | self._sequences.keys()
        self.stop_ids = tuple(sorted(self._stops.union(limits.eos)))
        detection = params.repetition_detection
        self._repetition = Repetition(detection) if detection is not None and detection.max_pattern_size else None
        self.follower: Follower | None = None  # of a request with structured outputs, once its grammar is there
        self._ends = False  # an EOS may end what the follower follows
        self.finish: Finish | None = None
        self._first_token: float | None = None
        self._next_to_send = self.prompt_len  # position
        self._told = False  # anything has been sent
        self._version: str | None = None  # of the weights that made the newest token
        self._generation = 0  # of the adapter that did
        self._versions: list[tuple[str, str, int]] = []  # with the adapter's label and where in the output each begins
        mode = params.logprobs_mode or limits.logprobs_mode
        named = len(params.logprob_token_ids or ())
        asked = params.logprobs is not None or named > 0
        width = _width(params.logprobs or 0, limits) + named
        self._logprobs = LogprobColumns(width, mode) if asked else None
        self._prompt_logprobs: LogprobColumns | None = None
        self._next_prompt_row = self.prompt_len  # the prompt token whose row is expected next
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = LogprobColumns(_width(params.prompt_logprobs, limits), mode)
            self._next_prompt_row = max(params.prompt_logprobs_start, 1)

    @property
    def wanted(self) -> int:
        """Tokens there are, counting those only the device knows."""
        return len(self.tokens) + self.pending

    @property
    def num_output(self) -> int:
        """Known output tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the cache: the last token must be computed to go on, and so
        must every position that a prompt logprob is still wanted from."""
        reusable = len(self.tokens) - 1
        if self._next_prompt_row < self.prompt_len:
            reusable = min(reusable, self._next_prompt_row - 1)
        return reusable

    def reusable_blocks(self, block_size: int) -> int:
        """Full blocks that may come from the cache.  One may reach past `reusable` by the last token: that
        position is then computed again, to the same bits."""
        reusable = self.reusable
        return (len(self.tokens) if reusable == len(self.tokens) - 1 else reusable) // block_size

    @property
    def may_draw(self) -> bool:
        """Nothing of its grammar is still to be worked out."""
        return self.grammar is None and (self.follower is None or not self.follower.due)

    @property
    def has_output(self) -> bool:
        """Whether `tell` has something that should be sent now."""
        return self.finish is not None or (not self.hold and len(self.tokens) > self._next_to_send)

    @property
    def released(self) -> bool:
        """Ended, and its slot and blocks are free."""
        return self.state is State.ENDED and self.slot < 0

    @property
    def spans(self) -> list[tuple[str, str, int, int]]:
        """(weight version, adapter's label or "", start, end) of output positions so far."""
        bounds = [start for *_, start in self._versions] + [self.num_output]
        return [
            (version, label, *span) for (version, label, _), span in zip(self._versions, pairwise(bounds), strict=True)
        ]

    def new_row(self) -> NewRow:
        """What the device must know when the request enters its slot."""
        tokens = np.array(self.tokens, dtype=np.int32)
        adapter = -1 if self.adapter is None else self.adapter.slot
        return NewRow(self.slot, self.rid, tokens, self.prompt_len, self.params, self.seed, self.stop_ids, adapter)

    def add_prompt_rows(self, start: int, rows: LogprobRows) -> None:
        """Keep the logprobs that a chunk from position `start` brought; those known from before a preemption
        are dropped."""
        if self._prompt_logprobs is None:
            return
        first = max(start + 1, self.params.prompt_logprobs_start, 1)
        known = self._next_prompt_row - first
        count = len(rows.token_logprobs)
        assert known >= 0, "a chunk left out prompt logprobs"
        if count > known:
            self._prompt_logprobs.add(rows, known, count)
            self._next_prompt_row += count - known

    def append(self, token: int, rows: PackedRows | None, row: int, version: str, now: float) -> None:
        """A drawn token, whose logprobs are row `row` of `rows`; sets `finish` if it is the last."""
        self.tokens.append(token)
        if self._first_token is None:
            self._first_token = now
        if self._logprobs is not None and rows is not None:
            self._logprobs.append(rows, row)
        if version != self._version or (self.adapter is not None and self.adapter.generation != self._generation):
            self._version = version
            label = ""
            if self.adapter is not None:
                self._generation, label = self.adapter.generation, self.adapter.label
            self._versions.append((version, label, self.num_output - 1))
        if token in self._enders or len(self.tokens) >= self.limit or self._repetition is not None:
            self._stop(token, now)
        if self.follower is not None and self.finish is None:
            self.follower.push(token)

    def follow(self, grammar: Grammar) -> None:
        """The grammar that was waited for is there."""
        self.grammar = None
        self._ends = any(map(self._drawable, self._eos))
        self.follower = Follower(grammar, ends=self._ends)

    def _drawable(self, token: int) -> bool:
        """Whether the request's lists of ids let it come."""
        params = self.params
        named = params.allowed_token_ids is None or token in params.allowed_token_ids
        return named and token not in params.bad_token_ids and [token] not in params.bad_token_sequences

    def followed(self, now: float) -> None:
        """It is known what may come next, if anything; sets `finish` if nothing may."""
        assert self.follower is not None
        if self.follower.error is not None:
            message = f"structured_outputs cannot be followed: {self.follower.error}"
            detail = "grammar_limit" if self.follower.limited else "error"
            self.end("error", detail, now, message=message)
        elif self.follower.complete and (not self._ends or self.num_output < self.params.min_tokens):  # no EOS may come
            self.end("stop", "grammar", now)

    def _stop(self, token: int, now: float) -> None:
        """The order of these lines is the order of the stop conditions."""
        count = self.num_output
        pattern = 0 if self._repetition is None else self._repetition.append(self.tokens, count)
        if count >= self.params.min_tokens:
            if token in self._eos:
                return self.end("stop", "eos", now)
            if token in self._stops:
                return self.end("stop", "stop_token", now, stop=token)
            for sequence in self._sequences.get(token, ()):
                size = len(sequence)
                if size <= count and self.tokens[-size:] == sequence:
                    return self.end("stop", "stop_sequence", now, stop=sequence.tolist())
        if count == self.params.max_tokens:
            return self.end("length", "max_tokens", now)
        if len(self.tokens) >= self.limit:
            return self.end("length", "context", now)
        if pattern and count >= self.params.min_tokens:
            return self.end("repetition", "repetition", now, stop=self.tokens[-pattern:].tolist())

    def end(
        self, reason: str, detail: str, now: float, *, stop: int | list[int] | None = None, message: str | None = None
    ) -> None:
        """Set `finish`."""

        def since(moment: float | None) -> float:
            return 0.0 if moment is None else moment - self.received

        self.finish = Finish(
            reason, detail, stop, message, since(self.admitted), since(self._first_token), since(now)
        )  # fmt: skip

    def tell(self, step: StepColumns) -> None:
        """Add what is new since the last call to a step's columns."""
        step.add(self.rid, self.tokens[self._next_to_send :], self._logprobs)
        self._next_to_send = len(self.tokens)
        if self.finish is not None or not self._told:
            scores, self._prompt_logprobs = self._prompt_logprobs, None
            if self._next_prompt_row < self.prompt_len:  # it ended within its prompt: all of them or none
                scores = None
            cached = 0 if self._told else self.cached or 0
            step.describe(self.finish, scores, cached, None if self.finish is None else self._told_spans())
            self._told = True

    def _told_spans(self) -> list[tuple[str, int, int]]:
        return [(f"{version}+{label}" if label else version, start, end) for version, label, start, end in self.spans]


def _width(asked: int, limits: Limits) -> int:
    return limits.vocab_size if asked < 0 else asked


def _prompt(packed: bytes, limits: Limits) -> array[int]:
    if not packed or len(packed) % 4:
        raise RequestError("the prompt must be a sequence of at least one packed int32 token id")
    ids = np.frombuffer(packed, dtype="<i4")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"token id {bad} of the prompt is not in the vocabulary of {limits.vocab_size}")
    if len(ids) + 1 > limits.context:
        raise RequestError(
            f"the prompt of {len(ids)} tokens and one new token do not fit: prompt and output together can have at "
            f"most {limits.context} tokens (the context of the model, or the whole KV cache if that is smaller)"
        )
    return array("i", packed)
