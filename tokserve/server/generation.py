"""`Generation`: an HTTP request in flight.

Its streams, one per prompt, are read as one, with the counts that usage and metrics need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tokserve.base.errors import RequestError
from tokserve.client.inputs import bare_id
from tokserve.client.outputs import ChoiceOutput, DraftCounts
from tokserve.protocol.params import DraftReport, SamplingParams
from tokserve.server.observer import Observer, Render
from tokserve.server.replies import reply_metrics
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.replies.timing import set_times

T = TypeVar("T")


class PromptTokensDetails(msgspec.Struct):
    """The part of the prompt that was found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Output tokens that a prediction foresaw, in all choices, and its tokens that did not come; output tokens of
    reasoning, if that is returned separately."""

    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET  # where SGLang's clients read it


class OutputStream(Protocol):
    """The outputs of one prompt: a `client.stream.Stream`, or the results of a search."""

    seed: int
    num_choices: int
    prompt_len: int

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""

    @property
    def placeholders(self) -> list[tuple[int, int]]:
        """Start and length of the prompt's features."""

    async def accepted(self) -> None:
        """Wait until the engine accepts the request.  Raises the errors of a refusal."""

    def take(self) -> Iterator[ChoiceOutput]:
        """The deltas that are available now.  Raises what ended the request."""

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call `listener` when there is something to take."""

    def stall(self, stalled: bool) -> None:
        """The client does not read, or reads again."""

    async def aclose(self) -> None:
        """Abort what has not ended."""


class ReplyContext(Protocol):
    """What rendering a reply needs besides the choices: a `Generation`, or the context of an external reply."""

    key: str
    n: int
    fingerprint: str | None  # of the server that generates; None: elsewhere
    kv_transfer_params: dict[str, Any] | None  # for a server that goes on with it

    def usage(self, later_tokens: int = 0) -> Usage:
        """Tokens read and written, without some of the last that were written."""

    def metrics(self) -> ReplyMetrics | UnsetType:
        """What the reply says about its drafts and times, if that was requested."""

    def prompt_ids(self, index: int = 0) -> list[int]:
        """The prompt of a choice."""


class Generation:
    """One HTTP request: its streams, read as one.  Choice index = prompt's index * n + the stream's choice index."""

    def __init__(self, request_id: str, n: int, observers: Sequence[Observer]) -> None:
        self.request_id = request_id
        self.key = bare_id(request_id)
        self.n = n
        self.is_stream = False  # the reply is a stream of events,
        self.keep_alive = 0.0  # which sends a comment after so many seconds without one
        self.fingerprint: str | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.streams: Sequence[OutputStream] = ()
        self.adjust: Callable[[ChoiceOutput], ChoiceOutput] | None = None
        self.rename: Callable[[RequestError], RequestError] = _unchanged  # names fields as in the route's body
        self.on_close: Callable[[], None] = lambda: None
        self.cause: str | None = "abort_disconnect"  # for the metrics, if it is closed before its end
        self.completion_tokens = 0
        self.prediction_len: int | None = None  # tokens; None: there is no prediction
        self.draft_report: DraftReport = "none"
        self.most_drafts = 0  # of a step
        self.reports_times = False
        self._observers = observers
        self._lengths: dict[int, int] = {}  # choice -> tokens so far
        self._cached: dict[int, int] = {}
        self._ended = 0
        self._drafts: list[DraftCounts] = []  # of the choices that have ended
        self._times = (0.0, 0.0, 0.0)  # of the choice that ended last
        self._closed = False
        self._ready: deque[int] = deque()  # indexes of streams that have something to take

    @property
    def num_choices(self) -> int:
        """How many choices there will be."""
        return self.n * len(self.streams)

    @property
    def seed(self) -> int:
        """The seed of the first choice."""
        return self.streams[0].seed

    def prompt_ids(self, index: int = 0) -> list[int]:
        return self.streams[index // self.n].prompt_ids

    def placeholders(self) -> list[tuple[int, int]]:
        """Start and length of the features of the first prompt."""
        return self.streams[0].placeholders

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` at once, and whenever there is something new to `take`; it must not raise."""
        for index, stream in enumerate(self.streams):
            self._ready.append(index)
            stream.listen(partial(self._on_output, index, listener))
        listener()

    def _on_output(self, index: int, listener: Callable[[], None]) -> None:
        self._ready.append(index)
        listener()

    @property
    def ended(self) -> bool:
        """Whether every choice's last delta has been taken."""
        return self._ended == self.num_choices

    def take(self) -> Iterator[ChoiceOutput]:
        """The deltas available now, of all choices; after them, raises the request's error, if any."""
        ready = self._ready
        while ready:
            index = ready[0]
            for delta in self.streams[index].take():
                delta.index += index * self.n
                yield self._account(delta)
            ready.popleft()

    def _account(self, delta: ChoiceOutput) -> ChoiceOutput:
        """The delta, adjusted, counted for usage and, at a choice's end, reported to the observers."""
        if self.adjust is not None:
            delta = self.adjust(delta)
        index, tokens = delta.index, len(delta.token_ids)
        self.completion_tokens += tokens
        self._lengths[index] = length = self._lengths.get(index, 0) + tokens
        if delta.cached_tokens:
            self._cached[index] = delta.cached_tokens
        if delta.finish_reason is not None:
            self._ended += 1
            self._drafts.append(delta.drafts)
            self._times = delta.times
            self.kv_transfer_params = self.kv_transfer_params or delta.values.get("kv_transfer")
            for observer in self._observers:
                observer.finished(delta, self.streams[index // self.n].prompt_len, length)
        return delta

    def started(self) -> None:
        for observer in self._observers:
            observer.started()

    def timed(self, render: Render) -> Render:
        """The function that renders its events, as its observers want it."""
        for observer in self._observers:
            render = observer.timed(render)
        return render

    def accepted(self, params: SamplingParams | None) -> None:
        for observer in self._observers:
            observer.accepted(self, params)

    def refused(self, error: RequestError) -> None:
        """The engine has refused it, or was not asked."""
        self.cause = None
        for observer in self._observers:
            observer.refused(error)

    def usage(self, later_tokens: int = 0) -> Usage:
        """Tokens so far, without the last `later_tokens` that were written.  Of the choices of one prompt, the one
        with the fewest cached tokens counts."""
        prompt = sum(stream.prompt_len for stream in self.streams)
        cached = 0
        for first in range(0, self.num_choices, self.n):
            seen = [i for i in range(first, first + self.n) if i in self._lengths]
            cached += min((self._cached.get(i, 0) for i in seen), default=0)
        output = self.completion_tokens - later_tokens
        usage = Usage(prompt, output, prompt + output, PromptTokensDetails(cached))
        if self.prediction_len is not None:
            accepted = sum(min(one.predicted, self.prediction_len) for one in self._drafts)
            rejected = self.prediction_len * len(self._drafts) - accepted
            usage.completion_tokens_details = CompletionTokensDetails(accepted, rejected)
        return usage

    def metrics(self, *, sources: bool = False) -> ReplyMetrics | UnsetType:
        """What the reply says about the drafts of the choices that have ended and about the times of the only one, if
        that was requested; `sources`: also by where drafts came from."""
        reports_times = self.reports_times and self.num_choices == 1
        if self.draft_report == "none" and not reports_times:
            return UNSET
        metrics = ReplyMetrics()
        if reports_times:
            set_times(metrics, self._times, self.completion_tokens)
        if self.draft_report != "none":
            report = reply_metrics.speculative_decoding(self._drafts, self.draft_report, self.most_drafts)
            if sources:
                report.sources = reply_metrics.by_source(self._drafts)
            metrics.speculative_decoding = report
        return metrics

    def stall(self, stalled: bool) -> None:
        """The client does not read (`stalled`), or reads again: meanwhile no tokens are made."""
        for stream in self.streams:
            stream.stall(stalled)

    async def close(self) -> None:
        """Abort what has not ended, and tell the observers; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for stream in self.streams:
            await stream.aclose()
        left = self.num_choices - self._ended
        self._ended = self.num_choices
        for observer in self._observers:
            if left and self.cause is not None:
                observer.aborted(self.cause, left)
            observer.closed()
        self.on_close()


def _unchanged(value: T) -> T:
    return value
