"""Completions: text or ids in, text out, in OpenAI's older shape; evaluation harnesses use it to score texts.

Several prompts are several requests in the engine under one id; choices are numbered prompt-major.
Without a tokenizer (--tokens-only) prompts are ids, and texts are empty: replies have the ids of `return_token_ids`.
`echo` puts the prompt before the output, with its logprobs if any are requested; `max_tokens` 0 then only
scores: the engine generates one token, which is dropped.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.client.inputs import GenerateRequest
from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.dialects.openai import schemas
from tokserve.dialects.openai.schemas import CompletionBody
from tokserve.features.beams.beam_fields import beam_params
from tokserve.features.beams.beam_search import BeamSearchParams
from tokserve.features.beams.beam_stream import search_of
from tokserve.features.chat.thinking_budget import with_markers
from tokserve.features.grammar import structured
from tokserve.features.speculation.prediction import with_prediction
from tokserve.protocol.logprobs import width_of
from tokserve.protocol.params import SamplingParams
from tokserve.server.generation import ReplyContext, Usage
from tokserve.server.http.body import encode_json
from tokserve.server.http.workers import ITEM
from tokserve.server.replies import fields, logprobs, sse
from tokserve.server.replies.fields import ColumnFields
from tokserve.server.replies.logprobs import NO_ROWS, PackedTopLogprobs, TextLogprobs
from tokserve.server.replies.reply_fields import StopDetail, WeightVersion, last_version, versions
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.replies.reply_parts import DeferredParts, single_part
from tokserve.server.request_starter import FieldPaths
from tokserve.server.route_call import RouteCall
from tokserve.server.serving import Serving

ID_PREFIX = "cmpl-"
DEFAULT_MAX_TOKENS = 16  # OpenAI's, when the field is absent; null is the rest of the context
MAX_PROMPTS = 4096
MAX_BEAMS = 512
MAX_CHOICES = 1 << 14  # of all prompts together: each is a request in the engine


class CompletionChoice(ColumnFields):
    """A choice, or a delta of one.  In a whole reply, ids and scores that were not requested are null.
    `matched_stop`: in SGLang's dialect."""

    index: int
    text: str
    logprobs: TextLogprobs | Raw | None
    finish_reason: str | None
    stop_reason: int | str | list[int] | None
    stop_detail: StopDetail | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    prompt_logprobs: Any = UNSET
    matched_stop: int | str | list[int] | UnsetType | None = UNSET


class CompletionReply(msgspec.Struct):
    """The whole reply, or an event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    weight_version: str | UnsetType | None = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET  # of a stream, in the last event
    metadata: dict[str, Any] | UnsetType = UNSET
    object: str = "text_completion"


class CompletionCall(NamedTuple):
    """A completions body, read and checked."""

    route: RouteCall[CompletionBody]
    params: SamplingParams
    generate: GenerateRequest
    prompts: list[str | list[int]]
    ids: list[list[int]]
    fields: FieldPaths
    beams: BeamSearchParams | None


async def completions(serving: Serving, request: Request) -> Response:
    """POST /v1/completions: text or ids in, text out"""
    return await respond(serving, request)


async def respond(serving: Serving, request: Request, renderer: type[CompletionRenderer] | None = None) -> Response:
    """Read the body, generate, and answer with what `renderer` makes of it; None: this module's."""
    call = await read_completion(serving, request)
    generation = await serving.requests.start(
        request, call.generate, call.ids, call.fields, search=search_of(call.beams)
    )
    render = (renderer or CompletionRenderer)(serving, generation, call.route.body, call.params, call.prompts)
    return await sse.respond(generation, request, render, call.route.headers)


async def read_completion(serving: Serving, request: Request, *, replies: bool = True) -> CompletionCall:
    """Read the body, and tokenize its prompts.  `replies` False: the reply is not a completion, and may be msgpack."""
    route = await schemas.read_body(serving, request, CompletionBody)
    body = route.body
    schemas.check_stream(body, replies and route.wants_msgpack)
    serving.requests.name_request(request, body, is_sent=replies)
    params = await route.run(lambda: with_markers(serving, sampling_params(serving, body)))
    bare = serving.requests.request_of(request, body, params, text=serving.text, score_each=True)
    prompts = await route.run(lambda: parse_prompts(body.prompt))
    if len(prompts) * params.n > MAX_CHOICES:
        count = f"{len(prompts)} prompts with n {params.n}"
        raise RequestError(f"n: a request may have at most {MAX_CHOICES} choices, and this has {count}", field="n")
    beams = beam_params(body, params)
    if beams is not None and len(prompts) * params.n > MAX_BEAMS:
        raise RequestError(f"n: beam search takes at most {MAX_BEAMS} beams of all prompts together", field="n")
    listed = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    special = body.add_special_tokens is not False
    size = route.size + ITEM * len(prompts)
    ids = await route.run(lambda: tokenized(serving, prompts, special, listed), size)
    generate = await route.run(lambda: with_prediction(serving, body, bare), size)
    others = {"extra_args": "vllm_xargs", "max_tokens": schemas.output_limit(body)[1]}
    if body.structured_outputs is None:
        others["structured_outputs"] = "response_format"
    others["beam_width"] = "n"
    fields = FieldPaths("prompt[0]" if listed and len(prompts) == 1 else "prompt", others=others)
    return CompletionCall(route, params, generate, prompts, ids, fields, beams)


def sampling_params(serving: Serving, body: CompletionBody) -> SamplingParams:
    """The body's sampling parameters, with the model's recommended defaults."""
    num_logprobs = schemas.count(body.logprobs)
    if num_logprobs is not None and num_logprobs < -1:
        raise RequestError("logprobs must be at least -1", field="logprobs")
    limit, name = schemas.output_limit(body, DEFAULT_MAX_TOKENS)
    num_prompt_logprobs = schemas.count(body.prompt_logprobs)
    if limit == 0 and num_prompt_logprobs is None:
        if not body.echo:
            raise RequestError(f"{name} must be at least 1 (0 scores a prompt, with echo)", field=name)
        num_prompt_logprobs = 0
    if body.echo and num_logprobs is not None:
        if body.prompt_logprobs_start:
            raise RequestError("prompt_logprobs_start must be 0 with echo", field="prompt_logprobs_start")
        both = (num_logprobs, num_prompt_logprobs or 0)
        num_prompt_logprobs = -1 if -1 in both else max(both)
    if body.packed_top_logprobs:
        _check_packed(serving, body, num_logprobs)
    form = structured.requested_format(body.structured_outputs, body.response_format, serving.form_defaults)
    return schemas.sampling(
        body,
        serving.model.defaults,
        max_tokens=limit,
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
        structured_outputs=form,
    )


def _check_packed(serving: Serving, body: CompletionBody, num_logprobs: int | None) -> None:
    """Refuse `packed_top_logprobs` beside what its form does not have.  Raises RequestError."""
    if not num_logprobs or not schemas.shows_ids(serving, body):
        raise invalid("packed_top_logprobs", "needs logprobs of 1 or more and return_tokens_as_token_ids")
    for name in ("echo", "use_beam_search", "logprob_token_ids"):
        if getattr(body, name):
            raise invalid("packed_top_logprobs", f"cannot be combined with {name}")


def parse_prompts(prompt: Any, field: str = "prompt") -> list[str | list[int]]:
    """The prompts in this field: a text, a list of texts, ids, or a list of lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        raise RequestError(f"{field} is required", field=field)
    if not isinstance(prompt, list):
        raise RequestError(f"{field} must be a string, a list of strings, token ids or a list of them", field=field)
    if not prompt:
        raise RequestError(f"{field} must not be empty", field=field)
    if type(prompt[0]) is int:
        _check_ids(prompt, field)
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"{field} must have at most {MAX_PROMPTS} entries, got {len(prompt)}", field=field)
    for index, one in enumerate(prompt):
        if isinstance(one, list):
            _check_ids(one, f"{field}[{index}]")
        elif not isinstance(one, str):
            raise RequestError(f"{field}[{index}] must be a string or token ids", field=f"{field}[{index}]")
    return prompt


def _check_ids(ids: list[Any], field: str) -> None:
    if not ids:
        raise RequestError(f"{field} must not be empty", field=field)
    if set(map(type, ids)) != {int}:
        index = next(i for i, token in enumerate(ids) if type(token) is not int)
        raise RequestError(f"{field}[{index}] must be a token id", field=f"{field}[{index}]")


def tokenized(
    serving: Serving,
    prompts: list[str | list[int]],
    special: bool,
    listed: bool,
    field: str = "prompt",
    min_bytes: int = 0,
) -> list[list[int]]:
    """The prompts as token ids.  `min_bytes`: of a text that need not fit into the context."""
    where = [f"{field}[{index}]" if listed else field for index in range(len(prompts))]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and not serving.text:
        index = next(index for index, prompt in enumerate(prompts) if isinstance(prompt, str))
        raise invalid(where[index], "needs a tokenizer, and this is a tokens-only server: send ids", code="tokens_only")
    for prompt, name in zip(prompts, where, strict=True):
        if isinstance(prompt, str):
            serving.check_text(prompt, name, min_bytes)
    encoded = iter(serving.tokenizer.encode_each(texts, special) if texts else ())
    ids_of_prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    for ids, name in zip(ids_of_prompts, where, strict=True):
        if not ids:
            raise RequestError(f"{name} must not be empty", field=name)
    return ids_of_prompts


class CompletionRenderer:
    """Completions as this route's JSON."""

    def __init__(
        self,
        serving: Serving,
        generation: ReplyContext,
        body: CompletionBody,
        params: SamplingParams,
        prompts: list[str | list[int]],
    ) -> None:
        self._id = ID_PREFIX + generation.key
        self._created = int(time.time())
        self._model = serving.model.answers_as(body.model)
        self._generation = generation
        self._prompts = prompts
        self._tokenizer = serving.tokenizer if serving.text else None
        self._skip_special = params.skip_special_tokens
        self._spelling = logprobs.Spelling(self._tokenizer, schemas.shows_ids(serving, body))
        self._ids = bool(body.return_token_ids)
        self._versions = self._ids or bool(body.return_weight_versions)
        self._echo = bool(body.echo)
        self._start = params.prompt_logprobs_start
        self._top = params.logprobs
        self._has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        self._packs = bool(body.packed_top_logprobs)
        self._columns = serving.model.columns_of(params)
        self._num_prompt_logprobs = schemas.count(body.prompt_logprobs)
        self._usage, self._continuous = schemas.usage_options(serving, body)
        self._places: dict[int, logprobs.TextOffset] = {}  # by choice that has begun: how far its text has come

    def reply(self, ends: list[ChoiceOutput], parts: DeferredParts | None = None) -> CompletionReply:
        choices = [self._choice(c, parts) for c in ends]
        for choice, name in product(choices, ("prompt_token_ids", "token_ids", "prompt_logprobs")):
            if getattr(choice, name) is UNSET:
                setattr(choice, name, None)
        generation = self._generation
        reply = CompletionReply(
            self._id,
            self._created,
            self._model,
            choices,
            generation.usage(),
            generation.fingerprint,
            metrics=generation.metrics(),
        )
        if generation.kv_transfer_params is not None:
            reply.kv_transfer_params = generation.kv_transfer_params
        if self._ids:
            reply.weight_version = last_version(ends)
        return reply

    def _choice(self, c: ChoiceOutput, parts: DeferredParts | None = None) -> CompletionChoice:
        """A choice from a delta; a choice's first delta also carries what was requested of the prompt."""
        choice = CompletionChoice(c.index, c.text or "", None, c.finish_reason, c.stop_reason)
        begins = c.index not in self._places
        if begins:
            prompt = self._begin(choice, c.prompt_logprobs, parts)
            pieces = logprobs.pieces_of(self._tokenizer, self._skip_special)
            self._places[c.index] = logprobs.TextOffset(pieces, len(prompt))
        if self._has_logprobs:
            make_logprobs = partial(self._logprobs, c, begins)
            choice.logprobs = make_logprobs() if parts is None else parts.defer(single_part(make_logprobs))
        fields.write_tokens(choice, c, self._columns, "lists", parts)
        if self._ids:
            choice.token_ids = c.token_ids
        if c.finish_reason is not None:
            choice.stop_detail = StopDetail(c.stop_detail, c.message)
            if self._versions:
                choice.weight_versions = versions(c)
            fields.write_end(choice, c, self._columns, "lists")
        return choice

    def _logprobs(self, c: ChoiceOutput, begins: bool) -> TextLogprobs:
        """The logprobs of a delta; `begins`: with those of a prompt that is repeated before it."""
        shown = TextLogprobs()
        if self._packs:
            shown.packed_top_logprobs = PackedTopLogprobs.of(c.logprobs, max(0, self._top or 0))
        if begins and self._echo:
            ids = self._generation.prompt_ids(c.index)
            place = self._prompt_start(ids, self._prompt_text(c.index))
            shown.add(None, ids[:1], self._spelling, place, 0, is_last=len(ids) == 1)
            top = width_of(c.prompt_logprobs) if c.prompt_logprobs and self._top == -1 else max(0, self._top or 0)
            shown.add(c.prompt_logprobs, ids[1:], self._spelling, place, top, is_last=True)
        if c.logprobs is not None:
            is_last = c.finish_reason is not None and not isinstance(c.stop_reason, str)  # a stop string cuts the text
            place = self._places[c.index]
            top = 0 if self._packs else width_of(c.logprobs)
            shown.add(c.logprobs, c.token_ids, self._spelling, place, top, is_last=is_last)
            if self._packs:
                shown.top_logprobs = []
        return shown

    def _prompt_start(self, ids: list[int], text: str) -> logprobs.TextOffset:
        """Where the tokens of the prompt, which has this `text`, begin."""
        if self._tokenizer is None:
            return logprobs.TextOffset(logprobs.NoPieces())
        exact = self._tokenizer.decode(ids, False) == text
        spaced = self._tokenizer.continuation(ids, not exact).startswith(" ") and not text.startswith(" ")
        return logprobs.TextOffset(self._tokenizer.pieces(not exact), -spaced)

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self._generation.n]
        if isinstance(prompt, str) or self._tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return self._tokenizer.decode(self._generation.prompt_ids(index), self._skip_special)

    def _begin(self, choice: CompletionChoice, scores: Column | None, parts: DeferredParts | None) -> str:
        """Add what was requested of the prompt; returns the part of the prompt that the text begins with."""
        ids = self._generation.prompt_ids(choice.index)
        columns = scores or NO_ROWS
        if self._ids:
            choice.prompt_token_ids = ids
        if self._num_prompt_logprobs is not None:
            first = max(1, self._start)
            top = width_of(columns) if self._num_prompt_logprobs == -1 else self._num_prompt_logprobs
            args = (columns, ids, first, top, None if self._tokenizer is None else self._tokenizer.token_texts)
            later = logprobs.prompt_objects_encoder
            choice.prompt_logprobs = logprobs.prompt_objects(*args) if parts is None else parts.defer(later(*args))
        if not self._echo:
            return ""
        text = self._prompt_text(choice.index)
        choice.text = text + choice.text
        return text

    def delta(self, delta: ChoiceOutput) -> bytes:
        """One event, or nothing if the delta is empty."""
        begins = delta.index not in self._places
        reply = self.joined_chunk(delta)
        if not (begins or reply.choices[0].text or delta.token_ids or delta.finish_reason):
            return b""
        if self._usage:
            reply.usage = self.usage() if self._continuous else None
        if delta.finish_reason is not None:
            reply.system_fingerprint = self._generation.fingerprint
        if "kv_transfer" in delta.values:
            reply.kv_transfer_params = delta.values["kv_transfer"]
        return sse.event(encode_json(reply))

    def skip(self, delta: ChoiceOutput) -> None:
        """Read a delta that was shown already."""
        self._choice(delta)
        if self._has_logprobs and delta.logprobs is None:
            for token_id in delta.token_ids:
                self._places[delta.index].add(token_id)

    def joined_chunk(self, delta: ChoiceOutput) -> CompletionReply:
        """The chunk of a delta."""
        return CompletionReply(self._id, self._created, self._model, [self._choice(delta)])

    def empty_chunk(self) -> CompletionReply:
        """A chunk without choices."""
        return CompletionReply(self._id, self._created, self._model, [])

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._generation.usage()

    def tail(self) -> bytes:
        if not self._usage:
            return b""
        reply = self.empty_chunk()
        reply.usage = self.usage()
        reply.metrics = self._generation.metrics()
        return sse.event(encode_json(reply))
