"""Turns replies of /inference/v1/generate into replies of chat and completions: the inverse of `render`.

The tokens may come from any server.  Replies are parsed into `ChoiceOutput`s, which the renderers of the text routes
render, so text, stop strings and logprobs follow the same rules.  A stream of chat is derendered chunk by chunk, each
in a call of its own: the client sends the state of the last reply, which has all ids so far, and a server that still
has the parsers of that state goes on with them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import RequestError, invalid
from tokserve.client.inputs import bare_id, check_lists
from tokserve.client.outputs import TERMINATORS, ChoiceOutput, Column
from tokserve.dialects.openai import chat, chat_prompts, completions, schemas, tools
from tokserve.dialects.openai.schemas import ChatBody, CompletionBody, RequestBody, TextBody
from tokserve.dialects.openai.tools import ToolPlan
from tokserve.features.chat.output_format import AT_CONTENT
from tokserve.protocol.columns import LOGPROBS, PROMPT_LOGPROBS
from tokserve.protocol.params import MAX_CHOICES, SamplingParams
from tokserve.server.generation import PromptTokensDetails, Usage
from tokserve.server.http import body
from tokserve.server.http.workers import off_loop
from tokserve.server.replies import logprobs_parser
from tokserve.server.replies.reply_metrics import ReplyMetrics
from tokserve.server.serving import Serving
from tokserve.text.detokenizer import Detokenizer
from tokserve.text.stops import StopStrings

D = TypeVar("D", bound="DerenderBody")
T = TypeVar("T", bound=TextBody)
R = TypeVar("R")
MAX_STREAMS = 512  # whose parsers are kept
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class DerenderBody(RequestBody):
    """The fields of both bodies."""

    stream: bool | None = None


class DerenderChatBody(DerenderBody):
    """The body of /v1/chat/completions/derender."""

    generate_response: Any = None
    generate_chunk: Any = None
    stream_state: Any = None
    chat_request: Any = None
    prompt_tokens: int | None = None
    prompt_token_ids: list[int] | None = None


class DerenderCompletionBody(DerenderBody):
    """The body of /v1/completions/derender: a reply per prompt."""

    generate_responses: list[Any] | None = None
    completion_request: Any = None
    prompt_tokens: list[int] | None = None
    prompt_token_ids: list[list[int]] | None = None


class ParsedPromptDetails(msgspec.Struct):
    """usage.prompt_tokens_details of a generate reply."""

    cached_tokens: Count = 0


class ParsedUsage(msgspec.Struct):
    """usage of a generate reply."""

    prompt_tokens: Count
    prompt_tokens_details: ParsedPromptDetails | None = None


class ParsedStopDetail(msgspec.Struct):
    """stop_detail of a choice."""

    kind: str | None = None
    message: str | None = None


class ParsedWeightVersion(msgspec.Struct):
    """Output tokens `start` to `end` - 1, if there are any, were made by one version of the weights."""

    version: str
    start: Count
    end: Count


class ParsedChoice(msgspec.Struct):
    """A choice of a generate reply; other servers leave out fields that have a default here."""

    token_ids: list[Count] | bytes
    index: Count = 0
    finish_reason: str | None = None
    stop_reason: int | str | list[int] | None = None
    logprobs: Any = None
    weight_versions: list[ParsedWeightVersion] | None = None
    stop_detail: ParsedStopDetail | None = None


class ParsedReply(msgspec.Struct):
    """A generate reply; other fields are ignored."""

    choices: list[ParsedChoice]
    request_id: str | None = None
    usage: ParsedUsage | None = None
    prompt_logprobs: Any = None
    prompt_token_ids: list[Count] | bytes | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: ReplyMetrics | None = None


class ParsedChunkUsage(ParsedUsage):
    """usage of a chunk."""

    completion_tokens: Count = 0


class ParsedChunk(msgspec.Struct):
    """An event of generate's stream; other fields are ignored."""

    choices: list[ParsedChoice]
    request_id: str | None = None
    usage: ParsedChunkUsage | None = None


class StreamState(msgspec.Struct):
    """What one choice's stream has come to; vLLM's state has these fields and others, of which only
    `prev_tokens` tells that ids are missing.  `output_chunk_lens`: the numbers of tokens that came together."""

    prev_tokens: Any = None
    output_token_ids: list[Count] = []
    output_chunk_lens: list[Count] = []
    role_sent: bool = False
    stream_id: str | None = None


class DerenderedChunk(msgspec.Struct):
    """The reply of a call about a chunk; `stream_state` belongs to the next one."""

    chunk: chat.ChatChunk
    stream_state: StreamState


class ExternalReply:
    """The `generation.ReplyContext` of replies that were generated elsewhere."""

    def __init__(self, request_id: str | None, n: int) -> None:
        self.key = bare_id(request_id) if request_id else secrets.token_hex(16)
        self.n = n
        self.fingerprint: str | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.reported: ReplyMetrics | None = None  # the metrics of the server that generated
        self.prompts: list[list[int]] = []
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def usage(self, later_tokens: int = 0) -> Usage:
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens - later_tokens
        return Usage(
            prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(self.cached_tokens)
        )

    def metrics(self) -> ReplyMetrics | UnsetType:
        return UNSET if self.reported is None else self.reported

    def prompt_ids(self, index: int = 0) -> list[int]:
        return self.prompts[index // self.n]


class ReplyReader:
    """Parses generate replies into `ChoiceOutput`s.  `params` None: unknown, and all of the replies is shown.
    `with_prompt`: the parameters, as they are for a prompt."""

    def __init__(
        self,
        serving: Serving,
        params: SamplingParams | None,
        needs_prompt: bool,
        with_prompt: Callable[[SamplingParams, list[int]], SamplingParams] | None = None,
    ) -> None:
        self._serving = serving
        self._with_prompt = with_prompt
        self._eos = frozenset(serving.llm.ready.eos_token_ids)
        self.params = msgspec.structs.replace(
            params or SamplingParams(), return_sampling_mask=False, return_entropy=False
        )
        self._known = params is not None
        self._needs_prompt = needs_prompt or (params is not None and params.prompt_logprobs is not None)
        self._external: ExternalReply | None = None
        self._stops = StopStrings(self.params.stop_strings())
        self.ends: list[ChoiceOutput] = []

    @property
    def external(self) -> ExternalReply:
        """The context of the replies; add one first."""
        assert self._external is not None
        return self._external

    def add(self, value: Any, field: str, prompt: Sequence[int] | None, count: int | None, index: str) -> None:
        """Parse one reply.  `prompt` and `count`: the prompt's ids and length, if the client sends them; `index`: their
        index in these fields, for errors."""
        reply = body.convert(value, ParsedReply, field)
        where = f"{field}.choices"
        if not reply.choices:
            raise invalid(where, "must not be empty")
        if self._external is None:
            n = self.params.n if self._known else len(reply.choices)
            self._external = ExternalReply(reply.request_id, n)
            if not self._known and reply.choices[0].logprobs is not None:
                self.params = msgspec.structs.replace(self.params, logprobs=0)
        external = self._external
        external.kv_transfer_params = external.kv_transfer_params or reply.kv_transfer_params
        external.reported = external.reported or reply.metrics
        if external.n > MAX_CHOICES:
            raise invalid(where, f"must have at most {MAX_CHOICES} entries, got {external.n}")
        if sorted(choice.index for choice in reply.choices) != list(range(external.n)):
            raise invalid(where, f"must have each index from 0 to {external.n - 1} once")
        ids = self._prompt(reply, field, prompt, index)
        if self._with_prompt is not None:
            self.params = self._with_prompt(self.params, ids or [])
        external.prompt_tokens += _prompt_length(reply, ids, count, index)
        if reply.usage is not None and reply.usage.prompt_tokens_details is not None:
            external.cached_tokens += reply.usage.prompt_tokens_details.cached_tokens
        scores = self._scores(reply, f"{field}.prompt_logprobs", ids)
        first = len(external.prompts) * external.n
        external.prompts.append(ids or [])
        ends = [self._end(choice, f"{where}[{i}]", scores) for i, choice in enumerate(reply.choices)]
        for end in sorted(ends, key=lambda end: end.index):
            end.index += first
            self.ends.append(end)

    def _prompt(self, reply: ParsedReply, field: str, prompt_ids: Sequence[int] | None, index: str) -> list[int] | None:
        """The prompt's ids, if the client sends them or the reply has them."""
        echoed = reply.prompt_token_ids
        echoed_ids = None if echoed is None else self.ids_of(echoed, f"{field}.prompt_token_ids")
        sent_ids = None if prompt_ids is None else self.ids_of(list(prompt_ids), f"prompt_token_ids{index}")
        if echoed_ids is not None and sent_ids is not None and echoed_ids != sent_ids:
            raise invalid(f"prompt_token_ids{index}", f"differs from {field}.prompt_token_ids")
        ids = echoed_ids if sent_ids is None else sent_ids
        if self._needs_prompt and not ids:
            raise RequestError(
                "prompt_token_ids is required: the reply has to repeat or score the prompt",
                field=f"prompt_token_ids{index}",
            )
        return ids

    def ids_of(self, ids: list[int] | bytes, field: str) -> list[int]:
        unpacked = body.unpack_ids(ids, field) if isinstance(ids, bytes) else ids
        self._serving.check_ids(unpacked, field)
        return unpacked

    def _scores(self, reply: ParsedReply, field: str, ids: list[int] | None) -> Column | None:
        """The prompt's logprobs, if the request has prompt_logprobs."""
        if self.params.prompt_logprobs is None:
            return None
        if reply.prompt_logprobs is None or ids is None:
            raise invalid(field, "is required: the request asks for them")
        start = max(1, self.params.prompt_logprobs_start)
        scores = logprobs_parser.parse_prompt(reply.prompt_logprobs, ids, self.params.prompt_logprobs, field)
        if scores is not None and scores.num_rows != len(ids) - start:
            raise invalid(field, "must have an entry per prompt token")
        return scores

    def logprobs_of(self, choice: ParsedChoice, ids: list[int], field: str) -> Column | None:
        params = self.params
        if params.logprobs is None and not params.logprob_token_ids:
            return None
        if choice.logprobs is None:
            raise invalid(field, "is required: the request asks for logprobs")
        top = (params.logprobs or 0) if self._known else None
        return logprobs_parser.parse_output(choice.logprobs, ids, top, params.logprob_token_ids or (), field)

    def _end(self, choice: ParsedChoice, where: str, scores: Column | None) -> ChoiceOutput:
        """Parse one choice; its text is cut at a stop string if the generating server has not done so."""
        ids = self.ids_of(choice.token_ids, f"{where}.token_ids")
        logprobs = self.logprobs_of(choice, ids, f"{where}.logprobs")
        kind = self.stop_kind(choice, ids)
        end = ChoiceOutput(
            choice.index,
            ids,
            "",
            {} if logprobs is None else {LOGPROBS: logprobs},
            values={} if scores is None else {PROMPT_LOGPROBS: scores},
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            stop_detail=kind,
            message=choice.stop_detail.message if choice.stop_detail else None,
        )
        text_ids = ids[:-1] if kind in TERMINATORS and not self.params.include_stop_str_in_output else ids
        stops, min_tokens = self.params.stop_strings(), self.params.min_tokens
        if isinstance(choice.stop_reason, str):  # already cut after the token that completed the match
            stops, min_tokens = [choice.stop_reason] if choice.stop_reason else [], max(0, len(ids) - 1)
        end.text, hit = self.detokenizer(stops, min_tokens).push(text_ids, True)
        if hit is not None:
            end.token_ids = ids[: hit.index + 1]
            end.columns = {name: column.part(0, hit.index + 1) for name, column in end.columns.items()}
            end.finish_reason, end.stop_reason, end.stop_detail, end.message = "stop", hit.text, "stop_string", None
        spans = ((span.version, span.start, min(span.end, len(end.token_ids))) for span in choice.weight_versions or ())
        end.weight_versions = [span for span in spans if span[1] < max(1, len(end.token_ids))]
        return end

    def detokenizer(self, stops: Sequence[str], min_tokens: int) -> Detokenizer:
        params = self.params
        shared = self._stops if stops == params.stop_strings() else stops
        return Detokenizer(
            self._serving.tokenizer,
            shared,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            spaces_between_special=params.spaces_between_special_tokens,
            min_tokens=min_tokens,
            stop_after=params.stop_after,
        )

    def stop_kind(self, choice: ParsedChoice, ids: list[int]) -> str | None:
        """The kind of stop_detail, as given, or inferred as far as possible."""
        if choice.stop_detail is not None and choice.stop_detail.kind is not None:
            return choice.stop_detail.kind
        reason = choice.stop_reason
        if choice.finish_reason == "stop" and ids:
            if isinstance(reason, str):
                return "stop_string"
            if reason is None and ids[-1] in self._eos:
                return "eos"
            if reason == ids[-1]:
                return "stop_token"
        return None


async def derender_chat(serving: Serving, request: Request) -> Response:
    """POST /v1/chat/completions/derender: a generate reply as a chat reply"""
    request_body, ignored, size = await schemas.read(serving, request, DerenderChatBody)
    if request_body.stream:
        return await _derender_chunk(serving, request, request_body, ignored, size)
    if request_body.generate_response is None:
        raise invalid("generate_response", "is required")
    text_body, plan, params = _chat_plan(serving, request_body.chat_request, ignored)

    def work() -> Response:
        sent, start = text_body or ChatBody(), AT_CONTENT

        def with_prompt(params: SamplingParams, prompt: list[int]) -> SamplingParams:
            nonlocal start
            start = chat.answer_start(serving, sent, plan, _prompt_of(serving, plan, prompt, sent))
            return plan.with_stops_after(params, start)

        reader = ReplyReader(serving, params, bool(sent.return_token_ids), with_prompt)
        ids, count = request_body.prompt_token_ids, request_body.prompt_tokens
        reader.add(request_body.generate_response, "generate_response", ids, count, "")
        external = reader.external
        external.completion_tokens = sum(len(end.token_ids) for end in reader.ends)
        answers = chat.reader_of(serving, plan, external, reader.params, start)
        renderer = chat.ChatRenderer(serving, external, sent, reader.params, answers)
        return body.reply(request, renderer.reply(reader.ends), schemas.ignored_header(ignored))

    return await off_loop(request, size, work)


def _chat_plan(
    serving: Serving, chat_request: Any, ignored: list[str]
) -> tuple[ChatBody | None, ToolPlan, SamplingParams | None]:
    """The chat that was rendered, how its outputs are parsed, and its parameters."""
    text_body = _request(serving, ChatBody, chat_request, "chat_request", ignored)
    if text_body is None:
        return None, tools.PLAIN_TEXT, None
    plan = with_prefix("chat_request", lambda: chat.tool_plan(serving, text_body))
    return text_body, plan, _params(serving, lambda: chat.sampling_params(serving, text_body, plan), "chat_request")


class ChatStream:
    """One choice's stream: its chunks become chat's.  `index`: the choice's."""

    def __init__(self, serving: Serving, sent: DerenderChatBody, request_id: str | None, index: int) -> None:
        self._serving = serving
        self.sent = sent
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.ended = False
        self.ignored: list[str] = []
        text_body, plan, params = _chat_plan(serving, sent.chat_request, self.ignored)
        body, start, prompt = text_body or ChatBody(), AT_CONTENT, sent.prompt_token_ids or []
        serving.check_ids(prompt, "prompt_token_ids")
        reader = ReplyReader(serving, params, needs_prompt=False)
        if text_body is not None:
            start = chat.answer_start(serving, body, plan, _prompt_of(serving, plan, prompt, body))
            reader.params = plan.with_stops_after(reader.params, start)
        self._reader, self._index = reader, index
        self._external = ExternalReply(request_id, max(reader.params.n, index + 1))
        self._external.prompts.append(prompt)
        self._external.prompt_tokens = len(prompt) or sent.prompt_tokens or 0
        answers = chat.reader_of(serving, plan, self._external, reader.params, start)
        self._renderer = chat.ChatRenderer(serving, self._external, body, reader.params, answers)
        self._detokenizer = reader.detokenizer(reader.params.stop_strings(), reader.params.min_tokens)

    def replay(self, state: StreamState) -> None:
        """Come to a state: the chunks that led there, without their logprobs."""
        position = 0
        if state.role_sent and not state.output_chunk_lens:
            self._renderer.skip(ChoiceOutput(self._index, [], ""))
        for length in state.output_chunk_lens:
            self._renderer.skip(self._delta(ParsedChoice(state.output_token_ids[position : position + length])))
            position += length

    def chunk(self, choice: ParsedChoice, field: str) -> chat.ChatChunk:
        """The next one."""
        ids = self._reader.ids_of(choice.token_ids, f"{field}.token_ids")
        if len(self.ids) + len(ids) > self._serving.llm.ready.max_model_len:
            raise invalid(f"{field}.token_ids", "make an output that is longer than the context")
        logprobs = self._reader.logprobs_of(choice, ids, f"{field}.logprobs") if ids else None
        choice.token_ids = ids
        return self._renderer.joined_chunk(self._delta(choice, logprobs))

    def _delta(self, choice: ParsedChoice, logprobs: Column | None = None) -> ChoiceOutput:
        ids = list(choice.token_ids)
        is_last = choice.finish_reason is not None
        kind = self._reader.stop_kind(choice, ids)
        delta = ChoiceOutput(
            self._index,
            ids,
            columns={} if logprobs is None else {LOGPROBS: logprobs},
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            stop_detail=kind,
            message=choice.stop_detail.message if choice.stop_detail else None,
        )
        text_ids = ids[:-1] if kind in TERMINATORS and not self._reader.params.include_stop_str_in_output else ids
        delta.text, hit = self._detokenizer.push(text_ids, is_last)
        if hit is not None:
            count = hit.index + 1 - len(self.ids)
            delta.token_ids = ids[:count]
            delta.columns = {name: column.part(0, count) for name, column in delta.columns.items()}
            delta.finish_reason, delta.stop_reason, delta.stop_detail = "stop", hit.text, "stop_string"
        self.ids += ids
        self.lengths.append(len(ids))
        self.ended = delta.finish_reason is not None
        spans = ((span.version, span.start, span.end) for span in choice.weight_versions or ())
        delta.weight_versions = list(spans)
        return delta

    def usage(self, used: ParsedChunkUsage) -> Usage:
        """The usage that a chunk reports."""
        self._external.prompt_tokens = used.prompt_tokens
        self._external.completion_tokens = used.completion_tokens
        if used.prompt_tokens_details is not None:
            self._external.cached_tokens = used.prompt_tokens_details.cached_tokens
        return self._renderer.usage()

    def chunk_without_choices(self) -> chat.ChatChunk:
        """A chunk for an event that has no choice, or comes after the end."""
        return self._renderer.empty_chunk()


class ChatStreams:
    """The streams whose parsers are kept, by their ids; a state says all that is needed to make one again."""

    def __init__(self, serving: Serving) -> None:
        self._streams: dict[str, ChatStream] = {}

    def take(self, state: StreamState, sent: DerenderChatBody) -> ChatStream | None:
        """The stream that is in this state, if it is here and was made for the same request."""
        stream = self._streams.pop(state.stream_id or "", None)
        same = stream is not None and stream.ids == state.output_token_ids and _same_request(stream.sent, sent)
        return stream if same else None

    def keep(self, stream_id: str, stream: ChatStream) -> None:
        """Keep a stream for the next chunk; the one that was used longest ago makes room."""
        self._streams[stream_id] = stream
        while len(self._streams) > MAX_STREAMS:
            self._streams.pop(next(iter(self._streams)), None)


def _same_request(one: DerenderChatBody, other: DerenderChatBody) -> bool:
    names = ("chat_request", "prompt_tokens", "prompt_token_ids")
    return all(getattr(one, name) == getattr(other, name) for name in names)


async def _derender_chunk(
    serving: Serving, request: Request, sent: DerenderChatBody, ignored: list[str], size: int
) -> Response:
    """One event of a stream of generate as one of chat."""
    if sent.generate_response is not None:
        raise invalid("generate_response", "is a complete reply: a stream has generate_chunk")
    if sent.generate_chunk is None:
        raise invalid("generate_chunk", "is required")
    chunk = body.convert(sent.generate_chunk, ParsedChunk, "generate_chunk")
    state = StreamState()
    if sent.stream_state is not None:
        state = body.convert(sent.stream_state, StreamState, "stream_state")
    if len(chunk.choices) > 1:
        raise invalid("generate_chunk.choices", "must have one choice: each has a stream_state of its own")
    if state.prev_tokens and not state.output_token_ids:
        raise invalid("stream_state", "must have output_token_ids: tokens alone do not say what was parsed")
    if sum(state.output_chunk_lens) != len(state.output_token_ids):
        raise invalid("stream_state", "must have all output_token_ids, and output_chunk_lens that add up to them")
    if len(state.output_token_ids) > serving.llm.ready.max_model_len:
        raise invalid("stream_state.output_token_ids", "are more than the context")
    serving.check_ids(state.output_token_ids, "stream_state.output_token_ids")
    streams = serving.state_of(ChatStreams)
    kept = streams.take(state, sent)

    def work() -> tuple[ChatStream, chat.ChatChunk]:
        index = chunk.choices[0].index if chunk.choices else 0
        if index >= MAX_CHOICES:
            raise invalid("generate_chunk.choices[0].index", f"must be below {MAX_CHOICES}")
        stream = kept
        if stream is None:
            stream = ChatStream(serving, sent, chunk.request_id, index)
            stream.replay(state)
        if chunk.choices and not stream.ended:
            made = stream.chunk(chunk.choices[0], "generate_chunk.choices[0]")
        else:
            made = stream.chunk_without_choices()
        if chunk.usage is not None:
            made.usage = stream.usage(chunk.usage)
        return stream, made

    stream, made = await off_loop(request, size + 8 * len(state.output_token_ids), work)
    stream_id = state.stream_id or secrets.token_hex(12)
    streams.keep(stream_id, stream)
    after = StreamState(
        output_token_ids=list(stream.ids),
        output_chunk_lens=list(stream.lengths),
        role_sent=state.role_sent or bool(stream.lengths),
        stream_id=stream_id,
    )
    reply = DerenderedChunk(made, after)
    return body.reply(request, reply, schemas.ignored_header([*ignored, *stream.ignored]))


async def derender_completions(serving: Serving, request: Request) -> Response:
    """POST /v1/completions/derender: the generate replies to a request's prompts as one reply"""
    request_body, ignored, size = await _read(serving, request, DerenderCompletionBody)
    replies = request_body.generate_responses
    if not replies:
        raise invalid("generate_responses", "must have a reply per prompt")
    for name in ("prompt_tokens", "prompt_token_ids"):
        entries = getattr(request_body, name)
        if entries is not None and len(entries) != len(replies):
            raise invalid(name, f"must have an entry per reply: {len(replies)}")
    text_body = _request(serving, CompletionBody, request_body.completion_request, "completion_request", ignored)
    params = None
    prompts: list[str | list[int]] = []
    if text_body is not None:
        params = _params(serving, lambda: completions.sampling_params(serving, text_body), "completion_request")
        prompts = _prompts(text_body, len(replies))

    def work() -> Response:
        needs_prompt = text_body is not None and bool(text_body.return_token_ids or text_body.echo)
        reader = ReplyReader(serving, params, needs_prompt)
        for i, reply in enumerate(replies):
            ids = None if request_body.prompt_token_ids is None else request_body.prompt_token_ids[i]
            count = None if request_body.prompt_tokens is None else request_body.prompt_tokens[i]
            reader.add(reply, f"generate_responses[{i}]", ids, count, f"[{i}]")
        ends, external = reader.ends, reader.external
        external.completion_tokens = sum(len(end.token_ids) for end in ends)
        texts = prompts or list(external.prompts)
        renderer = completions.CompletionRenderer(
            serving, external, text_body or CompletionBody(), reader.params, texts
        )
        return body.reply(request, renderer.reply(ends), schemas.ignored_header(ignored))

    return await off_loop(request, size, work)


async def _read(serving: Serving, request: Request, kind: type[D]) -> tuple[D, list[str], int]:
    """`schemas.read`, and refuse streams."""
    request_body, ignored, size = await schemas.read(serving, request, kind)
    if request_body.stream:
        raise invalid("stream", "must be false: only whole replies are taken")
    return request_body, ignored, size


def _request(serving: Serving, kind: type[T], value: Any, field: str, ignored: list[str]) -> T | None:
    """The request body that was rendered, if the client sends it."""
    if value is None:
        return None
    text_body, ignored_fields = with_prefix(
        field, lambda: schemas.parse(kind, value, strict=serving.config.server.strict)
    )
    with_prefix(field, lambda: serving.check_model(text_body.model))
    ignored += ignored_fields
    return text_body


def _params(serving: Serving, make: Callable[[], SamplingParams], field: str) -> SamplingParams:
    params = with_prefix(field, make)
    with_prefix(field, params.validate)
    with_prefix(field, lambda: check_lists(params, serving.config.limits, serving.llm.ready.vocab_size))
    return params


def _prompt_of(serving: Serving, plan: ToolPlan, ids: list[int], text_body: ChatBody) -> list[int]:
    """The prompt's ids, rendered from the messages if they are missing and needed: they show how the output begins."""
    thinking = plan.output_format is not None and plan.output_format.thinking is not None
    if ids or not thinking or text_body.messages is None:
        return ids
    return with_prefix("chat_request", lambda: chat_prompts.rendered(serving, text_body, text_body.reasoning_effort))


def _prompts(text_body: CompletionBody, count: int) -> list[str | list[int]]:
    """The prompts of the request, as texts or ids; empty if it has none."""
    if text_body.prompt is None:
        return []
    prompts = with_prefix("completion_request", lambda: completions.parse_prompts(text_body.prompt))
    if len(prompts) != count:
        raise invalid("generate_responses", f"must have a reply per prompt: {len(prompts)}, got {count}")
    return prompts


def _prompt_length(reply: ParsedReply, ids: list[int] | None, count: int | None, index: str) -> int:
    """The prompt's length, from three fields that must agree; 0 if it is in none."""
    usage_length = reply.usage.prompt_tokens if reply.usage else None
    lengths = [length for length in (count, len(ids) if ids else None, usage_length) if length is not None]
    if len(set(lengths)) > 1:
        field = f"prompt_tokens{index}"
        raise RequestError(
            f"{field}, prompt_token_ids and the reply's usage differ in the prompt's length", field=field
        )
    if lengths and not 0 <= lengths[0] < 1 << 31:
        raise invalid(f"prompt_tokens{index}", f"must be from 0 to {(1 << 31) - 1}")
    return lengths[0] if lengths else 0


def with_prefix(field: str, make: Callable[[], R]) -> R:
    """`make()`; `field` is prepended to the field of an error."""
    try:
        return make()
    except RequestError as error:
        if error.field is None:
            error.message, error.field = error.message.replace("the body", field), field
        else:
            error.rename_field(f"{field}.{error.field}")
        raise
