"""Beam search: the most probable outputs of a prompt, found by requests of one token for each beam.

Candidates are chosen as transformers does with `early_stopping="never"`; a score is the sum of a beam's raw logprobs
divided by its length, a closing EOS included, to the power of `length_penalty`.  A step is one submission for all
prompts; its prompts are in the prefix cache but for their last tokens.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tokserve.base.errors import QueueFull, invalid
from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.inputs import GenerateRequest
from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.client.request_state import RequestState
from tokserve.client.stream import collect
from tokserve.protocol.columns import LOGPROBS, join
from tokserve.protocol.logprobs import Logprobs
from tokserve.protocol.messages import Ready
from tokserve.protocol.params import LogprobsMode, SamplingParams
from tokserve.protocol.prompt import TokenPrompt, pack_ids
from tokserve.text.detokenizer import Detokenizer

Spans = list[tuple[str, int, int]]
RETRY_SECONDS = 0.1


class BeamSearchParams(msgspec.Struct):
    """What to search for; positional arguments have vLLM's order.  `logprobs`: alternatives of each token in the
    output; None: none and no logprobs.  `temperature` and `watermarking` are taken and have no effect: scores are of
    the model's own distribution.  Raises RequestError."""

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("beam_width", 1), ("max_tokens", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise invalid(name, f"must be an integer of at least {least}, got {value!r}")
        if not isinstance(self.length_penalty, int | float) or not abs(self.length_penalty) <= 1e3:
            raise invalid("length_penalty", f"must be from -1000 to 1000, got {self.length_penalty!r}")
        if self.structured_outputs is not None:
            raise invalid("structured_outputs", "is not supported by beam search", code="unsupported")

    def validate(self, ready: Ready, max_logprobs: int) -> None:
        """Check what depends on the model.  Raises RequestError naming a field."""
        choices = ready.vocab_size if self.allowed_token_ids is None else len(set(self.allowed_token_ids))
        most = ready.vocab_size if max_logprobs == -1 else min(max_logprobs, ready.vocab_size)
        needed = self.alternatives(ready)
        if needed > most:
            limit = most - needed + self.beam_width
            rule = f"must be at most {limit}" if limit > 0 else "cannot be honoured"
            raise invalid(
                "beam_width",
                f"{rule}: beam search needs {needed} alternatives of each token, and there are {most} (--max-logprobs)",
            )
        if self.beam_width > choices:
            raise invalid("beam_width", f"must be at most {choices}, as many as tokens to choose from")

    def alternatives(self, ready: Ready) -> int:
        """The number of alternatives of each token: enough for beams that go on if every EOS is among them, and as many
        as were requested."""
        ends = 0 if self.ignore_eos else len(ready.eos_token_ids)
        return max(min(self.beam_width + ends, ready.vocab_size), self.logprobs or 0)

    def step(self, ready: Ready) -> SamplingParams:
        """The parameters of a step's requests, each for one token."""
        allowed = self.allowed_token_ids
        mode: LogprobsMode = "raw" if allowed is None else "processed"
        return SamplingParams(
            max_tokens=1,
            temperature=1.0,
            seed=0,
            ignore_eos=True,
            detokenize=False,
            allowed_token_ids=allowed,
            logprobs=self.alternatives(ready),
            logprobs_mode=mode,
        )


@dataclass(frozen=True, slots=True)
class Beam:
    """An output so far: its tokens, the sum of their logprobs, their rows of logprobs if any are to be returned, and by
    which weights."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0
    rows: tuple[Column, ...] = ()
    versions: tuple[str, ...] = ()
    finish_reason: str | None = None
    stop_detail: str | None = None
    message: str | None = None

    def extended(self, token: int, logprob: float, row: Column | None, version: str) -> Beam:
        """The beam with one more token; `row`: the logprobs of its position, to be kept."""
        if row is None:
            return Beam((*self.tokens, token), self.total + logprob, (), (*self.versions, version))
        pairs = np.frombuffer(row.records, "<i4").reshape(-1, 2).copy()  # of the token, then of the alternatives
        pairs[0, 0] = np.flatnonzero(pairs[1:, 0] == token)[0] + 1
        pairs.view(np.float32)[0, 1] = logprob
        drawn = Column(pairs.tobytes(), row.stride, b"", row.form)
        return Beam((*self.tokens, token), self.total + logprob, (*self.rows, drawn), (*self.versions, version))

    def ended(self, reason: str, detail: str | None, message: str | None = None) -> Beam:
        """The beam as a result."""
        return Beam(self.tokens, self.total, self.rows, self.versions, reason, detail, message)

    def score(self, length_penalty: float) -> float:
        """The score by which results are compared."""
        return self.total / math.pow(max(1, len(self.tokens)), length_penalty)

    def spans(self) -> Spans:
        """(version, start, end) of its tokens."""
        spans: Spans = []
        for position, version in enumerate(self.versions):
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], position + 1)
            else:
                spans.append((version, position, position + 1))
        return spans


@dataclass(slots=True)
class BeamSearch:
    """The search of one prompt; `limit`: most tokens of an output, `ends`: ids that end it."""

    width: int
    limit: int
    ends: frozenset[int]
    length_penalty: float
    keeps_rows: bool = False  # the logprobs of outputs are returned
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    done: list[Beam] = field(default_factory=list)  # the best `width` so far, best first
    ended: bool = False

    def step(self, rows: Sequence[tuple[Column, str]]) -> None:
        """Go on by a token.  `rows`: of each live beam, the logprobs of its next token in one row, and the weights'
        version."""
        candidates = []
        for number, (beam, (row, _)) in enumerate(zip(self.live, rows, strict=True)):
            tops = Logprobs.of(row)
            scored = zip(tops.top_ids[0].tolist(), tops.top_logprobs[0].tolist(), strict=True)
            candidates += [(-(beam.total + value), number, token, value) for token, value in scored if value > -np.inf]
        candidates.sort()
        kept = [(row if self.keeps_rows else None, version) for row, version in rows]
        live: list[Beam] = []
        for rank, (_, number, token, value) in enumerate(candidates):
            if rank >= self.width and len(live) == self.width:
                break
            beam = self.live[number]
            if token in self.ends:
                if rank < self.width:
                    self.done.append(beam.extended(token, value, *kept[number]).ended("stop", "eos"))
            elif len(beam.tokens) + 1 == self.limit:
                if rank < self.width:
                    self.done.append(beam.extended(token, value, *kept[number]).ended("length", "max_tokens"))
            elif len(live) < self.width:
                live.append(beam.extended(token, value, *kept[number]))
        self.live = live
        self._rank()
        self.ended = not live or (len(self.done) == self.width and self._best_possible() <= self._score(self.done[-1]))

    def give_up(self, reason: str, detail: str | None, message: str | None) -> None:
        """A request has ended otherwise than by its token: what is live is a result as it is."""
        self.done += [beam.ended(reason, detail, message) for beam in self.live]
        self._rank()
        self.done += [Beam().ended(reason, detail, message)] * (self.width - len(self.done))
        self.ended = True

    def _rank(self) -> None:
        self.done = sorted(self.done, key=lambda beam: -self._score(beam))[: self.width]

    def _score(self, beam: Beam) -> float:
        return beam.score(self.length_penalty)

    def _best_possible(self) -> float:
        """No result of a live beam can have a higher score."""
        length = self.limit if self.length_penalty > 0 else len(self.live[0].tokens) + 1
        return self.live[0].total / math.pow(length, self.length_penalty)


class BeamRun:
    """The searches of several prompts, a step of all of them at a time.

    `request`: what the requests of the steps have in common; `client`: who is served in turns with other clients;
    `announcement`: of the request, if it was announced.  The run ends it.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        request: GenerateRequest,
        prompts: Sequence[TokenPrompt],
        params: BeamSearchParams,
        client: str = "",
        announcement: RequestAnnouncement | None = None,
    ) -> None:
        self.params, self.prompts = params, prompts
        self.cached = [0] * len(prompts)
        self.times = (0.0, 0.0, 0.0)
        self._llm, self._client = llm, client
        self._announcement = announcement
        self._request = msgspec.structs.replace(request, task=params.step(llm.ready), text=False)
        ready = llm.ready
        ends = frozenset(() if params.ignore_eos else ready.eos_token_ids)
        self.searches = [
            BeamSearch(
                params.beam_width,
                min(params.max_tokens, ready.max_model_len - len(prompt.ids) // 4),
                ends,
                params.length_penalty,
                params.logprobs is not None,
            )
            for prompt in prompts
        ]

    async def run(self, accepted: Callable[[], None], progress: Callable[[], None]) -> None:
        """Search; `accepted` is called when the engine has accepted the first step, `progress` for each prompt that is
        done.  Raises what a submission raises.  Cancelling aborts the step's requests."""
        if self._announcement is None:  # between two steps the engine has no request of the search
            self._announcement = self._llm.announce(self._request.request_id, self._request.options.group_id)
        try:
            await self._search(accepted, progress)
        finally:
            self._announcement.end()

    async def _search(self, accepted: Callable[[], None], progress: Callable[[], None]) -> None:
        began = time.monotonic()
        while live := [index for index, search in enumerate(self.searches) if not search.ended]:
            requests = await asyncio.to_thread(self._prepared, live)
            async with AsyncExitStack() as stack:
                streams = self._llm.submit(requests, self._client, self._announcement)
                for stream in streams:
                    await stack.enter_async_context(stream)
                try:
                    await streams[0].accepted()
                except QueueFull:
                    if self.times[2] == 0.0:
                        raise
                    await asyncio.sleep(RETRY_SECONDS)  # what was accepted once is not refused half-way
                    continue
                accepted()
                outputs = [(await collect(stream))[0] for stream in streams]
            for index in live:
                count = len(self.searches[index].live)
                self._take(index, outputs[:count])
                del outputs[:count]
                if self.searches[index].ended:
                    progress()
            self.times = (*self.times[:2], time.monotonic() - began)

    def _prepared(self, live: Sequence[int]) -> list[RequestState]:
        """A request for each live beam of these prompts."""
        requests: list[RequestState] = []
        for index in live:
            prompt = self.prompts[index]
            for beam in self.searches[index].live:
                longer = TokenPrompt(prompt.ids + pack_ids(beam.tokens), prompt.features)
                request = msgspec.structs.replace(self._request, prompt=longer, first_choice=len(requests))
                requests.append(self._llm.prepare(request))
        return requests

    def _take(self, index: int, outputs: Sequence[ChoiceOutput]) -> None:
        search = self.searches[index]
        if search.live[0].tokens == ():
            self.cached[index], self.times = outputs[0].cached_tokens, outputs[0].times
        failed = next((one for one in outputs if one.finish_reason != "length" or one.logprobs is None), None)
        if failed is not None:
            return search.give_up(failed.finish_reason or "error", failed.stop_detail, failed.message)
        versions = [one.weight_versions[-1][0] if one.weight_versions else "" for one in outputs]
        rows = [one.logprobs for one in outputs if one.logprobs is not None]
        search.step(list(zip(rows, versions, strict=True)))

    def outputs(self, index: int, detokenizer: Callable[[], Detokenizer] | None) -> list[ChoiceOutput]:
        """The results of a prompt, best first, as choices that have ended.  `detokenizer`: makes one for a text."""
        return [
            ChoiceOutput(
                rank,
                list(beam.tokens),
                self._text(beam, detokenizer),
                self._columns(beam),
                cached_tokens=self.cached[index],
                finish_reason=beam.finish_reason,
                stop_detail=beam.stop_detail,
                message=beam.message,
                weight_versions=beam.spans(),
                times=self.times,
            )
            for rank, beam in enumerate(self.searches[index].done)
        ]

    def _text(self, beam: Beam, detokenizer: Callable[[], Detokenizer] | None) -> str | None:
        if detokenizer is None:
            return None
        tokens = beam.tokens
        if beam.stop_detail == "eos" and not self.params.include_stop_str_in_output:
            tokens = tokens[:-1]
        return detokenizer().push(tokens, final=True)[0]

    def _columns(self, beam: Beam) -> dict[str, Column]:
        top = self.params.logprobs
        if top is None or not beam.rows:
            return {}
        return {LOGPROBS: join([Logprobs.of(row).column(top) for row in beam.rows])}
