"""Turns what the engine sends for a request into `ChoiceOutput` deltas: text, stop strings, merging, the end.

A `Choice` receives the outputs of one engine request and merges those not fetched yet into one delta, however slow
the consumer is.  A `Delivery` is the choices of one request, and where its consumer waits.  Sends nothing:
`Choice.accept` only says when the engine should be told to stop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from tokserve.errors import RequestError
from tokserve.messages import Extra, Finish, Logprobs, Ready, Status, StepStats
from tokserve.text.detokenizer import Detokenizer, StopHit

__all__ = [
    "Choice", "ChoiceOutput", "Delivery", "Logprobs", "Ready", "Status", "StepStats", "TextRules", "join_logprobs",
    "merge",
]  # fmt: skip

TERMINATORS = ("eos", "stop_token")  # stop details whose last token is not part of the text


class ChoiceOutput(msgspec.Struct):
    """New output of one choice since the last delta; with `finish_reason`, its last.

    `text` is None where none was asked for.  `prompt_logprobs` and `cached_tokens` come once, with the first
    delta.  `stop_reason`: the token id, sequence or string that matched.  `stop_detail`: see `messages.Finish`, or
    `stop_string`.  `weight_versions`: (version, start, end) of output positions, with the last delta, as are `times`:
    seconds from arrival to a slot, to the first token and to the end (0.0 for what was not reached).
    """

    index: int
    token_ids: list[int]
    text: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | list[int] | None = None
    stop_detail: str | None = None
    message: str | None = None
    weight_versions: list[tuple[str, int, int]] = []
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)


class TextRules(NamedTuple):
    """`wanted`: completions carry text.  `keep_stop`: the stop string or token is part of the text."""

    wanted: bool = False
    keep_stop: bool = False


NO_TEXT = TextRules()


class Choice:
    """One engine request.  `hold`: nothing is handed out before the end.

    `awaits_scores`: the prompt's logprobs come from the first choice of the request, with the first delta; until they
    are there, nothing is handed out.
    """

    __slots__ = (
        "_cached", "_count", "_detokenizer", "_finish", "_hit", "_ids", "_logprobs", "_prompt_logprobs", "_rules",
        "_spans", "_texts", "awaits_scores", "delivery", "finished", "hold", "index", "rid", "scored", "waiting",
    )  # fmt: skip

    def __init__(
        self, index: int, rid: str, hold: bool = False,
        detokenizer: Detokenizer | None = None, rules: TextRules = NO_TEXT, *, awaits_scores: bool = False,
    ) -> None:  # fmt: skip
        self.awaits_scores = awaits_scores
        self.scored = False  # the prompt's logprobs have come, or will not
        self.index = index
        self.rid = rid
        self.hold = hold
        self.finished = False
        self.waiting = False  # in the delivery's line of choices with something to fetch
        self.delivery: Delivery
        self._detokenizer = detokenizer
        self._rules = rules
        self._hit: StopHit | None = None
        self._finish: Finish | None = None
        self._count = 0  # tokens accepted
        self._ids: list[int] = []  # this and below: accepted, not yet fetched
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: Logprobs | None = None
        self._cached = 0
        self._spans: list[tuple[str, int, int]] = []

    def accept(self, ids: list[int], logprobs: Logprobs | None, extra: Extra | None) -> bool:
        """Take a row of a step.  True: a stop string ended the choice, and the engine should be told.

        The choice is finished only by the engine's last output of the request, which brings times and weight versions.
        """
        if extra is None:
            return self._hit is None and self._take_tokens(ids, logprobs, None)
        finish = extra.finish
        if extra.prompt_logprobs is not None:
            self._prompt_logprobs = extra.prompt_logprobs
            self.scored = True
        if extra.cached:
            self._cached = extra.cached
        stopped = self._hit is None and self._take_tokens(ids, logprobs, finish)
        if finish is not None:
            self._finish = finish
            self._spans = extra.spans
            self.finished = self.scored = True
        return stopped and finish is None

    def _take_tokens(self, ids: list[int], logprobs: Logprobs | None, finish: Finish | None) -> bool:
        """Take tokens, logprobs and text up to a stop string; True if there is one."""
        hit = None
        if self._detokenizer is not None:
            shown = ids[:-1] if finish and finish.detail in TERMINATORS and not self._rules.keep_stop else ids
            text, hit = self._detokenizer.push(shown, finish is not None)
            if text:
                self._texts.append(text)
            if hit is not None:
                keep = hit.index + 1 - self._count
                self._hit = hit
                ids = ids[:keep]
                logprobs = logprobs.cut(keep) if logprobs else None
        self._ids += ids
        self._count += len(ids)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        return hit is not None

    @property
    def ready(self) -> bool:
        """There is something to fetch."""
        return not self.awaits_scores and (self.finished or (self._hit is None and not self.hold))

    def share_scores(self, others: Sequence[Choice]) -> list[Choice]:
        """Give the prompt's logprobs to the choices that await them; returns those of them that have outputs."""
        for other in others:
            other.awaits_scores = False
            other._prompt_logprobs = self._prompt_logprobs
        return [other for other in others if other.finished or other._count]

    def take(self) -> ChoiceOutput:
        """Everything since the last call, as one delta."""
        text = "".join(self._texts) if self._rules.wanted else None
        delta = ChoiceOutput(
            self.index, self._ids, text, join_logprobs(self._logprobs), self._prompt_logprobs, self._cached
        )
        self._ids = []
        self._texts = []
        self._logprobs = []
        self._prompt_logprobs = None
        self._cached = 0
        if self._finish is not None:
            self._describe_end(delta, self._finish)
        return delta

    def _describe_end(self, delta: ChoiceOutput, finish: Finish) -> None:
        delta.finish_reason, delta.stop_detail, delta.message = finish.reason, finish.detail, finish.message
        delta.stop_reason = finish.stop
        delta.times = finish.queued, finish.first_token, finish.total
        delta.weight_versions = [
            (version, start, min(end, self._count)) for version, start, end in self._spans if start < self._count
        ]
        if self._hit is not None:
            delta.finish_reason, delta.stop_detail, delta.stop_reason = "stop", "stop_string", self._hit.text
            delta.message = None


class Delivery:
    """The choices of one request, between the engine that produces their outputs and the consumer that fetches them.

    The consumer either sets a callback for the request's lifetime (`listen`) or waits in `fetch`.
    """

    def __init__(self, request_id: str, choices: Sequence[Choice]) -> None:
        self.request_id = request_id
        self.choices = choices
        self.num_open = len(choices)
        self._awaiting = [choice for choice in choices if choice.awaits_scores]
        self._line: deque[Choice] = deque()  # choices with something to fetch
        self._listener: Callable[[], None] | None = None
        self._error: RequestError | None = None
        for choice in choices:
            choice.delivery = self

    def open_rids(self) -> list[str]:
        """Engine requests that have not ended."""
        return [choice.rid for choice in self.choices if not choice.finished]

    def offer(self, choice: Choice) -> bool:
        """`choice` has accepted an output.  True: there is something new to fetch, so `tell` must be called."""
        if choice.finished:
            self.num_open -= 1
        is_new = False
        if self._awaiting and choice is self.choices[0] and choice.scored:
            for other in choice.share_scores(self._awaiting):
                is_new |= self._line_up(other)
            self._awaiting = []
        return self._line_up(choice) or is_new

    def _line_up(self, choice: Choice) -> bool:
        if choice.waiting or not choice.ready:
            return False
        choice.waiting = True
        self._line.append(choice)
        return True

    def fail(self, error: RequestError) -> None:
        """Nothing more will come."""
        self._error = error
        self.tell()

    def abandon(self) -> None:
        """The request is given up: its consumer sees the end."""
        self.num_open = 0
        self.tell()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Set the callback that `tell` calls; None removes it."""
        if listener is not None and self._listener is not None:
            raise RuntimeError("a stream has one consumer at a time")
        self._listener = listener

    def tell(self) -> None:
        """Call the consumer, if there is one."""
        if self._listener is not None:
            self._listener()

    @property
    def ended(self) -> bool:
        """All choices have ended, and their last deltas are fetched."""
        return self.num_open == 0 and not self._line

    def take(self) -> Iterator[ChoiceOutput]:
        """The deltas available now; after them, raises the error given to `fail`, if any."""
        line = self._line
        while line:
            choice = line.popleft()
            choice.waiting = False
            yield choice.take()
        if self._error is not None:
            raise self._error

    async def fetch(self) -> ChoiceOutput | None:
        """The next delta of any choice; None when all have ended.  Raises the error given to `fail`."""
        while True:
            delta = next(self.take(), None)
            if delta is not None or self.ended:
                return delta
            news = asyncio.Event()
            self.listen(news.set)
            try:
                await news.wait()
            finally:
                self.listen(None)


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs | None:
    """The rows of all parts in order."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(
        b"".join(part.token_logprobs for part in parts), b"".join(part.ranks for part in parts),
        b"".join(part.top_ids for part in parts), b"".join(part.top_logprobs for part in parts),
        parts[0].width, parts[0].mode,
    )  # fmt: skip


def merge(deltas: Iterable[ChoiceOutput]) -> list[ChoiceOutput]:
    """One completion per choice, by index: what the same request returns when it is not streamed."""
    by_index: dict[int, list[ChoiceOutput]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [_merge_one(by_index[index]) for index in sorted(by_index)]


def _merge_one(parts: list[ChoiceOutput]) -> ChoiceOutput:
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    texts = [part.text for part in parts if part.text is not None]
    return ChoiceOutput(
        index=last.index,
        token_ids=[token for part in parts for token in part.token_ids],
        text="".join(texts) if last.text is not None else None,
        logprobs=join_logprobs([part.logprobs for part in parts if part.logprobs is not None]),
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        cached_tokens=max(part.cached_tokens for part in parts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        stop_detail=last.stop_detail,
        message=last.message,
        weight_versions=last.weight_versions,
        times=last.times,
    )
