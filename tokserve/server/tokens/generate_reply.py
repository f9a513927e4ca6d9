"""The replies of the token route: whole, and as events.

msgspec encodes them; most of a streamed token's event is encoded once per choice.
"""

from __future__ import annotations

import time
from array import array
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tokserve.client.outputs import ChoiceOutput, Column
from tokserve.protocol.logprobs import stride_of, width_of
from tokserve.protocol.params import SamplingParams
from tokserve.server.generation import Generation, Usage
from tokserve.server.http.body import encode_json
from tokserve.server.replies import fields, logprobs, sse
from tokserve.server.replies.candidates import CandidateFields, write_candidates
from tokserve.server.replies.fields import ColumnFields
from tokserve.server.replies.messages import MessageReader
from tokserve.server.replies.reply_fields import StopDetail, WeightVersion, prompt_versions, versions
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.replies.reply_parts import DeferredParts, single_part
from tokserve.server.serving import Serving
from tokserve.server.tokens.generate_body import AnyBody, StreamOptions

ID_PREFIX = "generate-tokens-"
HOLE = Raw(b"\0")  # stands for a value that comes later: a byte that no JSON contains


class GenerateChoice(ColumnFields):
    """A choice, or a delta of one."""

    index: int
    token_ids: list[int] | bytes | Raw
    finish_reason: str | None
    stop_reason: int | str | list[int] | None
    logprobs: Any
    weight_versions: list[WeightVersion] | UnsetType = UNSET
    prompt_weight_versions: list[WeightVersion] | UnsetType = UNSET
    stop_detail: StopDetail | UnsetType = UNSET
    text: str | Raw | UnsetType | None = UNSET
    message: Any = UNSET  # with output_mode "derender"; in a stream it is `delta`
    delta: Any = UNSET


class PlaceholderRange(msgspec.Struct):
    """Where the tokens of an image lie in the prompt."""

    offset: int
    length: int


class GenerateReply(CandidateFields):
    """The whole reply."""

    request_id: str
    id: str
    created: int
    model: str
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: Any
    seed: int
    prompt_token_ids: list[int] | bytes | UnsetType = UNSET
    mm_placeholders: dict[str, list[PlaceholderRange]] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | None = None
    exact: bool = True
    metrics: ReplyMetrics | UnsetType = UNSET
    output_mode: str = "tokens"
    object: str = "inference.generate"


class GenerateChunk(CandidateFields):
    """An event of a stream; the first has the fields after `usage`."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    mm_placeholders: dict[str, list[PlaceholderRange]] | UnsetType = UNSET
    prompt_logprobs: Any = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET  # in the last one
    output_mode: str = "tokens"


class TokenRender:
    """Completions as this route's JSON."""

    def __init__(
        self,
        serving: Serving,
        generation: Generation,
        body: AnyBody,
        params: SamplingParams,
        *,
        packed: bool,
        expands: bool = False,
        messages: MessageReader | None = None,
    ) -> None:
        """`expands`: the prompt is longer than the client's, which is told.  `messages`: reads the outputs."""
        self._messages = messages
        self._id = ID_PREFIX + generation.key
        self._serving = serving
        self._model = serving.model.answers_as(body.model)
        self._generation = generation
        self._params = params
        self._packed = packed
        self._mode = body.output_mode or "tokens"
        self._text = self._mode == "text"
        self._spelling = logprobs.Spelling(serving.tokenizer, as_ids=False) if self._text else None
        self._echo = bool(body.return_token_ids) or expands
        self._places: dict[str, list[PlaceholderRange]] | UnsetType = UNSET
        if expands:
            self._places = {"image": [PlaceholderRange(*place) for place in generation.placeholders()]}
        self._format = body.logprobs_format or "objects"
        options = body.stream_options or StreamOptions()
        forced = serving.config.replies.enable_force_include_usage
        self._usage = forced or bool(options.include_usage)
        self._continuous = forced or (self._usage and bool(options.continuous_usage_stats))
        self._first = True
        self._frames: dict[int, list[bytes]] = {}  # by choice
        self._has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        # a delta without tokens has no columns, and a client who requested logprobs gets empty lists
        self._no_rows = Column(b"", stride_of(0), b"", params.computed_mode(serving.config.model.logprobs_mode))
        self._columns = serving.model.columns_of(params)
        self._form: fields.Form = "lists" if self._format == "objects" else self._format
        if packed:
            self._form = "packed"
        self._scores_due = params.scores_prompt
        self._candidates = params.prompt_logprob_token_ids is not None

    def _choice(self, c: ChoiceOutput, parts: DeferredParts | None = None, *, is_delta: bool = False) -> GenerateChoice:
        choice = GenerateChoice(
            c.index,
            self._ids(c.token_ids),
            c.finish_reason,
            c.stop_reason,
            self._logprobs(c.logprobs or self._no_rows, c.token_ids, parts) if self._has_logprobs else None,
            UNSET if c.finish_reason is None else versions(c),
            prompt_versions(c) if len(c.prompt_weight_versions) > 1 else UNSET,
            UNSET if c.finish_reason is None else StopDetail(c.stop_detail, c.message),
            c.text or "" if self._text else UNSET,
        )
        if self._messages is not None and is_delta:
            choice.delta = self._messages.delta(c)
        elif self._messages is not None:
            choice.message = self._messages.message(c)
        fields.write_tokens(choice, c, self._columns, self._form, parts)
        if c.finish_reason is not None:
            fields.write_end(choice, c, self._columns, self._form)
        return choice

    def _ids(self, ids: list[int]) -> list[int] | bytes:
        return array("i", ids).tobytes() if self._packed else ids

    def _logprobs(self, columns: Column, ids: list[int], parts: DeferredParts | None = None) -> Any:
        if self._format == "objects":
            top = width_of(columns) - len(self._params.logprob_token_ids or ())
            if parts is not None:
                return parts.defer(logprobs.objects_encoder(columns, ids, top, self._spelling))
            return logprobs.objects(columns, ids, top, self._spelling)
        make = logprobs.packed if self._packed or self._format == "base64" else logprobs.arrays
        return make(columns) if parts is None else parts.defer(single_part(lambda: make(columns)))

    def _prompt_logprobs(self, columns: Column | None, parts: DeferredParts | None = None) -> Any:
        """The prompt's logprobs in the requested format.  There are no columns for a prompt of one token, nor for one
        that was never computed."""
        first = max(1, self._params.prompt_logprobs_start)
        columns = columns or self._no_rows
        if self._format == "objects":
            texts = self._serving.tokenizer.token_texts if self._text else None
            args = (columns, self._generation.prompt_ids(), first, width_of(columns), texts)
            if parts is not None:
                return parts.defer(logprobs.prompt_objects_encoder(*args))
            return logprobs.prompt_objects(*args)
        make = logprobs.packed if self._packed or self._format == "base64" else logprobs.arrays
        return make(columns, first) if parts is None else parts.defer(single_part(lambda: make(columns, first)))

    def reply(self, completions: list[ChoiceOutput], parts: DeferredParts | None = None) -> GenerateReply:
        generation = self._generation
        scores, columns = None, None
        if self._scores_due:
            columns = next((c.prompt_logprobs for c in completions if c.prompt_logprobs), None)
            scores = None if self._candidates else self._prompt_logprobs(columns, parts)
        reply = GenerateReply(
            request_id=self._id,
            id=self._id,
            created=int(time.time()),
            model=self._model,
            choices=[self._choice(c, parts) for c in completions],
            usage=generation.usage(),
            prompt_logprobs=scores,
            seed=generation.seed,
            prompt_token_ids=self._ids(generation.prompt_ids()) if self._echo else UNSET,
            mm_placeholders=self._places,
            kv_transfer_params=generation.kv_transfer_params,
            exact=bool(self._serving.llm.ready.facts.get("exact", True)),
            metrics=generation.metrics(sources=True),
            output_mode=self._mode,
        )
        if self._candidates:
            write_candidates(reply, columns)
        return reply

    def delta(self, delta: ChoiceOutput) -> bytes:
        changes = self._first or self._continuous or self._scores_due or self._messages is not None
        if changes or delta.finish_reason is not None:
            return self._event(delta)
        return self._plain_event(delta)

    def _plain_event(self, delta: ChoiceOutput) -> bytes:
        """The event of a delta in the middle of a stream: all but the tokens is constant, and encoded once."""
        frame = self._frames.get(delta.index)
        if frame is None:
            frame = self._frames[delta.index] = self._frame(delta.index)
        event = frame[0] + encode_json(delta.token_ids)
        if self._has_logprobs:
            event += frame[1] + encode_json(self._logprobs(delta.logprobs or self._no_rows, delta.token_ids))
        place = 2 if self._has_logprobs else 1
        if self._text:
            event += frame[place] + encode_json(delta.text or "")
            place += 1
        for name in self._columns:
            for value in fields.writers()[name].tokens(delta.columns.get(name), self._form).values():
                event += frame[place] + encode_json(value)
                place += 1
        return event + frame[-1]

    def _frame(self, index: int) -> list[bytes]:
        """The constant parts of an event: around the token ids and, if these are wanted, the logprobs, the text, and
        the fields of columns."""
        logprobs, text = HOLE if self._has_logprobs else None, HOLE if self._text else UNSET
        choice = GenerateChoice(index, HOLE, None, None, logprobs, text=text)
        for name in self._columns:
            for field in fields.writers()[name].of_tokens:
                setattr(choice, field, HOLE)
        chunk = GenerateChunk(self._id, [choice], None if self._usage else UNSET, output_mode=self._mode)
        return sse.event(encode_json(chunk)).split(HOLE)

    def _event(self, delta: ChoiceOutput) -> bytes:
        chunk = GenerateChunk(self._id, [self._choice(delta, is_delta=True)], output_mode=self._mode)
        if self._usage:
            chunk.usage = self._generation.usage() if self._continuous else None
        if self._first:
            self._first = False
            chunk.model, chunk.created, chunk.seed = self._model, int(time.time()), self._generation.seed
            if self._echo:
                chunk.prompt_token_ids = self._generation.prompt_ids()
            chunk.mm_placeholders = self._places
        if "kv_transfer" in delta.values:
            chunk.kv_transfer_params = delta.values["kv_transfer"]
        if self._scores_due and (delta.prompt_logprobs or self._generation.ended):
            self._scores_due = False
            if self._candidates:
                write_candidates(chunk, delta.prompt_logprobs)
            else:
                chunk.prompt_logprobs = self._prompt_logprobs(delta.prompt_logprobs)
        return sse.event(encode_json(chunk))

    def tail(self) -> bytes:
        if not self._usage:
            return b""
        usage, metrics = self._generation.usage(), self._generation.metrics(sources=True)
        return sse.event(encode_json(GenerateChunk(self._id, [], usage, metrics=metrics, output_mode=self._mode)))
