"""What the Python API returns: `RequestOutput` and its parts, under vLLM's names where they mean the same.

Logprobs stay columns, and become dictionaries only when indexed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tokserve.client.outputs import ChoiceOutput, Column, merge
from tokserve.client.sampling_params import OutputRules, RequestOutputKind
from tokserve.client.stream import Stream
from tokserve.protocol.adapter_choice import LoRARequest
from tokserve.protocol.column_table import output_specs
from tokserve.protocol.images import Placeholder
from tokserve.protocol.logprobs import Logprobs
from tokserve.protocol.params import SamplingParams
from tokserve.text.token_texts import LOOKBACK, TokenTexts
from tokserve.text.tokenizer import Tokenizer

T = TypeVar("T")


class Logprob(NamedTuple):
    """One token's logprob at one position; rank 1 is the most probable, 0 means unknown.

    `decoded_token` is its text at its place (see `TokenTexts`); None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class LogprobTable:
    """Logprobs of n tokens as numpy arrays.

    `token_logprobs` and `ranks` [n] are of the tokens themselves, `top_ids` and `top_logprobs` [n, width] of the
    most probable tokens in descending order, then of the ids asked for by name.  `before`: the last tokens before them.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        packed: Column,
        named: int = 0,
        texts: TokenTexts | None = None,
        before: Sequence[int] = (),
    ) -> None:
        arrays = Logprobs.of(packed)
        self.token_ids = list(token_ids)
        self.mode = arrays.mode
        self.token_logprobs, self.ranks = arrays.token_logprobs, arrays.ranks
        self.top_ids, self.top_logprobs = arrays.top_ids, arrays.top_logprobs
        self._ranked = arrays.width - named
        self._texts = texts
        self._before = list(before[-LOOKBACK:])

    def by_id(self, row: int) -> dict[int, Logprob]:
        """A row as {token id: Logprob}, its own token first."""
        ids, values = self.top_ids[row].tolist(), self.top_logprobs[row].tolist()
        name = self._name_at(row)
        named = zip(ids[self._ranked :], values[self._ranked :], strict=True)
        top = {token: Logprob(value, 0, name(token)) for token, value in named}
        top |= {ids[i]: Logprob(values[i], i + 1, name(ids[i])) for i in range(self._ranked)}
        token_id = self.token_ids[row]
        token = {token_id: Logprob(float(self.token_logprobs[row]), int(self.ranks[row]), name(token_id))}
        return token | top | token

    def __getstate__(self) -> dict[str, Any]:
        """A pickle has the texts of the tokens that occur, not the tokenizer."""
        if self._texts is None:
            return vars(self)
        occurring = {*self._before, *self.token_ids, *self.top_ids.ravel().tolist()}
        return {**vars(self), "_texts": self._texts.only(sorted(occurring))}

    def _name_at(self, row: int) -> Callable[[int], str | None]:
        if self._texts is None:
            return lambda token: None
        near = self.token_ids[max(0, row - LOOKBACK) : row]
        return self._texts.after(near if row >= LOOKBACK else self._before + near)


class TokenLogprobs(LogprobTable, Sequence[dict[int, Logprob]]):
    """Logprobs of an output's tokens: `[i]` is {token id: Logprob} of token i, a slice a list of these."""

    def __len__(self) -> int:
        return len(self.token_logprobs)

    @overload
    def __getitem__(self, position: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, position: slice) -> list[dict[int, Logprob]]: ...
    def __getitem__(self, position: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob]]:
        rows = range(len(self))[position]
        return self.by_id(rows) if isinstance(rows, int) else [self.by_id(row) for row in rows]


class PromptLogprobs(LogprobTable, Sequence[dict[int, Logprob] | None]):
    """Logprobs of a prompt's tokens: `[i]` is of token i, None for the first and those before prompt_logprobs_start.

    The arrays have no rows for these: row j is of token `start` + j.
    """

    def __init__(self, prompt_ids: Sequence[int], packed: Column, texts: TokenTexts | None = None) -> None:
        self.start = len(prompt_ids) - packed.num_rows
        super().__init__(prompt_ids[self.start :], packed, texts=texts, before=prompt_ids[: self.start])

    def __len__(self) -> int:
        return self.start + len(self.token_logprobs)

    @overload
    def __getitem__(self, position: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, position: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, position: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        places = range(len(self))[position]
        return self._at(places) if isinstance(places, int) else [self._at(place) for place in places]

    def _at(self, place: int) -> dict[int, Logprob] | None:
        return self.by_id(place - self.start) if place >= self.start else None


@dataclass(slots=True)
class CompletionOutput:
    """One choice.  `finish_reason` "error" comes with a `message`.

    `routed_experts` (`enable_return_routed_experts`): the experts chosen for each position of prompt and output but the
    last, uint8 or uint16 [positions, layers, experts per token]; zeros in layers without experts.

    With `return_sampling_mask`, by token: `sampling_mask`, the ascending ids that it was drawn from (None: the whole
    vocabulary, or more ids than `max_sampling_mask`, of which there are `sampling_mask_truncated`),
    `sampling_logprobs`, its logprob among them, and `kept_logprob`, that of all of them in the model's distribution at
    the temperature.

    `others`: by name, what a column or value brings that has no attribute here.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: int | str | list[int] | None
    stop_detail: str | None = None
    message: str | None = None
    weight_versions: list[tuple[str, int, int]] = field(default_factory=list)
    routed_experts: NDArray[Any] | None = None
    sampling_mask: list[NDArray[np.int32] | None] | None = None
    sampling_logprobs: NDArray[np.float32] | None = None
    kept_logprob: NDArray[np.float32] | None = None
    sampling_mask_truncated: int = 0
    prompt_weight_versions: list[tuple[str, int, int]] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestMetrics:
    """When a finished request was where, under vLLM's names: `arrival_time` of the system's clock, the others of the
    monotonic clock, `first_token_latency` in seconds; 0.0 for what was not reached.  The first of several choices
    counts, and of `last_token_ts` the last."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float
    num_generation_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices.

    `multi_modal_placeholders`: {"image": where the embeddings of each lie in `prompt_token_ids`}, or empty.  `metrics`:
    of a request that is finished.  `lora_request`: as it was given.  With `prompt_logprob_token_ids`, by row:
    `prompt_token_id_logprobs` [rows, K] of the candidates, `prompt_rest_logprobs` [rows] of all other ids together,
    `prompt_token_logprobs` [rows] of the prompt's tokens.  `encoder_prompt` and the like of vLLM's are None: there are
    no such models here.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: PromptLogprobs | None
    num_cached_tokens: int
    seed: int
    finished: bool = True
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | str | None = None
    multi_modal_placeholders: dict[str, list[Placeholder]] = field(default_factory=dict)
    prompt_token_id_logprobs: NDArray[np.float32] | None = None
    prompt_rest_logprobs: NDArray[np.float32] | None = None
    prompt_token_logprobs: NDArray[np.float32] | None = None


@dataclass
class PooledRequestOutput(Generic[T]):
    """A prompt, or a pair, and what was made of it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: T
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector, float32 [dimensions]."""

    embedding: list[float]


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """A prompt and its vector."""


@dataclass(slots=True)
class ClassificationOutput:
    """Probabilities of the labels, or logits, float32 [labels]."""

    probs: list[float]


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """A prompt and its probabilities."""


@dataclass(slots=True)
class PoolingOutput:
    """A vector, or probabilities or logits, float32."""

    data: NDArray[np.float32]


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """A prompt and what was made of it."""


@dataclass(slots=True)
class ScoringOutput:
    """How well a pair fits."""

    score: float


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """A pair and its score; `prompt_token_ids` are of both."""


def request_output(
    stream: Stream,
    prompt: str | None,
    params: SamplingParams,
    done: list[ChoiceOutput],
    tokenizer: Tokenizer | None,
    lora_request: LoRARequest | str | None = None,
    before: Mapping[int, Sequence[int]] | None = None,
) -> RequestOutput:
    """The choices so far, or whole, in vLLM's shape; or, of tokens by index `before` them, what came then."""
    texts = tokenizer.token_texts if tokenizer and params.detokenize else None
    prompt_rows = next((c.prompt_logprobs for c in done if c.prompt_logprobs is not None), None)
    prompt_logprobs = None
    candidates: tuple[NDArray[np.float32], ...] = ()
    if prompt_rows is not None and params.prompt_logprob_token_ids is not None:
        rows = Logprobs.of(prompt_rows)
        candidates = rows.top_logprobs[:, :-1].copy(), rows.top_logprobs[:, -1].copy(), rows.token_logprobs.copy()
    elif prompt_rows is not None:
        prompt_logprobs = PromptLogprobs(stream.prompt_ids, prompt_rows, texts)
    cached = min((c.cached_tokens for c in done), default=0)  # all choices share one prompt
    finished = len(done) == stream.num_choices and all(c.finish_reason is not None for c in done)
    images = [Placeholder(*place) for place in stream.placeholders]
    choices = [_choice(c, params, texts, (before or {}).get(c.index, ())) for c in done]
    return RequestOutput(
        stream.request_id,
        prompt,
        stream.prompt_ids,
        choices,
        prompt_logprobs,
        cached,
        stream.seed,
        finished,
        _metrics(stream, done) if finished else None,
        lora_request,
        {"image": images} if images else {},
        *candidates,
    )


def _choice(
    c: ChoiceOutput, params: SamplingParams, texts: TokenTexts | None, before: Sequence[int]
) -> CompletionOutput:
    named = len(params.logprob_token_ids or ())
    logprobs = None if c.logprobs is None else TokenLogprobs(c.token_ids, c.logprobs, named, texts, before)
    total = None if logprobs is None else float(logprobs.token_logprobs.sum(dtype=np.float64))
    output = CompletionOutput(
        index=c.index,
        text=c.text or "",
        token_ids=c.token_ids,
        logprobs=logprobs,
        cumulative_logprob=total,
        finish_reason=c.finish_reason,
        stop_reason=c.stop_reason,
        stop_detail=c.stop_detail,
        message=c.message,
        weight_versions=c.weight_versions,
        prompt_weight_versions=c.prompt_weight_versions,
    )
    for spec in output_specs():
        if spec.result is not None:
            for attribute, value in spec.result(c).items():
                if hasattr(output, attribute):
                    setattr(output, attribute, value)
                else:
                    output.others[attribute] = value
    return output


def _metrics(stream: Stream, done: list[ChoiceOutput]) -> RequestMetrics:
    at = stream.arrival
    slots, firsts, ends = zip(*(c.times for c in done), strict=True)
    slot, first = (min((value for value in values if value), default=0.0) for values in (slots, firsts))
    return RequestMetrics(
        arrival_time=time.time() - (time.monotonic() - at),
        queued_ts=at,
        scheduled_ts=at + slot if slot else 0.0,
        first_token_ts=at + first if first else 0.0,
        last_token_ts=at + max(ends),
        first_token_latency=first,
        num_generation_tokens=sum(len(c.token_ids) for c in done),
    )


async def follow(
    stream: Stream,
    prompt: str | None,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    rules: OutputRules,
    lora_request: LoRARequest | str | None = None,
) -> AsyncIterator[RequestOutput]:
    """The request's outputs as `rules` says: all tokens so far or the new ones, at the end or every so many tokens, the
    first and the last in any case."""
    whole: list[ChoiceOutput] = []
    new: list[ChoiceOutput] = []
    is_first = True
    async for delta in stream:
        whole, new = merge([*whole, delta]), merge([*new, delta])
        sent = request_output(stream, prompt, params, whole, tokenizer, lora_request)
        if not sent.finished:
            if rules.kind is RequestOutputKind.FINAL_ONLY:
                continue
            if not is_first and max(len(c.token_ids) for c in new) < rules.interval:
                continue
        if rules.kind is RequestOutputKind.DELTA:
            counts = {c.index: len(c.token_ids) for c in new}
            before = {c.index: c.token_ids[: len(c.token_ids) - counts.get(c.index, 0)] for c in whole}
            part = request_output(stream, prompt, params, new, tokenizer, lora_request, before)
            part.finished, part.metrics, part.num_cached_tokens = sent.finished, sent.metrics, sent.num_cached_tokens
            sent = part
        yield sent
        new, is_first = [], False
