"""Streams of generate that are derendered chunk by chunk, each in a call of its own.

The client sends the state of the last reply, which has all ids so far, and a server that still has the parsers of that
state goes on with them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from tokserve.base.errors import invalid
from tokserve.client.outputs import TERMINATORS, ChoiceOutput, Column
from tokserve.dialects.openai import chat, completions
from tokserve.dialects.openai.derender.bodies import Count, DerenderBody, ParsedChoice, ParsedChunk, ParsedChunkUsage
from tokserve.dialects.openai.derender.reader import ExternalReply, ReplyReader
from tokserve.protocol.columns import LOGPROBS
from tokserve.protocol.params import MAX_CHOICES
from tokserve.server.generation import Usage
from tokserve.server.http import body
from tokserve.server.route_call import RouteCall, ignored_header
from tokserve.server.serving import Serving

MAX_STREAMS = 512  # whose parsers are kept


class StreamState(msgspec.Struct):
    """What one choice's stream has come to; vLLM's state has these fields and others, of which only
    `prev_tokens` tells that ids are missing.  `output_chunk_lens`: the numbers of tokens that came together."""

    prev_tokens: Any = None
    output_token_ids: list[Count] = []
    output_chunk_lens: list[Count] = []
    role_sent: bool = False
    stream_id: str | None = None


class DerenderedChunk(msgspec.Struct):
    """The reply of a call about a chunk of chat; `stream_state` belongs to the next one."""

    chunk: chat.ChatChunk
    stream_state: StreamState


class DerenderedCompletion(msgspec.Struct):
    """The same of completions."""

    chunk: completions.CompletionReply
    stream_state: StreamState


Chunk = chat.ChatChunk | completions.CompletionReply


class ChunkRenderer(Protocol):
    """Renders the deltas of a choice."""

    def skip(self, delta: ChoiceOutput) -> None:
        """Read a delta that was shown already."""

    def joined_chunk(self, delta: ChoiceOutput) -> Chunk:
        """The chunk of a delta."""

    def empty_chunk(self) -> Chunk:
        """A chunk without choices."""

    def usage(self) -> Usage:
        """Tokens so far."""


class DerenderStream:
    """One choice's stream: its chunks become those of a text route.  `index`: the choice's.  `ignored`: names of the
    request's fields without effect."""

    def __init__(
        self,
        serving: Serving,
        sent: DerenderBody,
        reader: ReplyReader,
        external: ExternalReply,
        renderer: ChunkRenderer,
        index: int,
        ignored: list[str],
    ) -> None:
        self.sent = sent
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.ended = False
        self.ignored = ignored
        self._longest = serving.llm.ready.max_model_len
        self._reader, self._external, self._renderer, self._index = reader, external, renderer, index
        self._detokenizer = reader.detokenizer(reader.params.stop_strings(), reader.params.min_tokens)

    def replay(self, state: StreamState) -> None:
        """Come to a state: the chunks that led there, without their logprobs."""
        position = 0
        if state.role_sent and not state.output_chunk_lens:
            self._renderer.skip(ChoiceOutput(self._index, [], ""))
        for length in state.output_chunk_lens:
            self._renderer.skip(self._delta(ParsedChoice(state.output_token_ids[position : position + length])))
            position += length

    def chunk(self, choice: ParsedChoice, field: str) -> Chunk:
        """The next one."""
        ids = self._reader.ids_of(choice.token_ids, f"{field}.token_ids")
        if len(self.ids) + len(ids) > self._longest:
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

    def chunk_without_choices(self) -> Chunk:
        """A chunk for an event that has no choice, or comes after the end."""
        return self._renderer.empty_chunk()


class DerenderStreams:
    """The streams whose parsers are kept, by their ids; a state says all that is needed to make one again."""

    def __init__(self, serving: Serving) -> None:
        self._streams: dict[str, DerenderStream] = {}

    def take(self, state: StreamState, sent: DerenderBody) -> DerenderStream | None:
        """The stream that is in this state, if it is here and was made for the same request."""
        stream = self._streams.pop(state.stream_id or "", None)
        same = stream is not None and stream.ids == state.output_token_ids and _same_request(stream.sent, sent)
        return stream if same else None

    def keep(self, stream_id: str, stream: DerenderStream) -> None:
        """Keep a stream for the next chunk; the one that was used longest ago makes room."""
        self._streams[stream_id] = stream
        while len(self._streams) > MAX_STREAMS:
            self._streams.pop(next(iter(self._streams)), None)


def _same_request(one: DerenderBody, other: DerenderBody) -> bool:
    names = [name for name in type(one).model_fields if name not in ("generate_chunk", "stream_state")]
    return type(one) is type(other) and all(getattr(one, name) == getattr(other, name) for name in names)


Make = Callable[[str | None, int], DerenderStream]  # of the id of the request that generates, and a choice's index


async def derender_chunk(route: RouteCall[DerenderBody], make: Make) -> Response:
    """One event of a stream of generate as one of a text route.  `make`: makes a stream that has not begun."""
    serving, sent = route.serving, route.body
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
    streams = serving.state_of(DerenderStreams)
    kept = streams.take(state, sent)

    def work() -> tuple[DerenderStream, Chunk]:
        index = chunk.choices[0].index if chunk.choices else 0
        if index >= MAX_CHOICES:
            raise invalid("generate_chunk.choices[0].index", f"must be below {MAX_CHOICES}")
        stream = kept
        if stream is None:
            stream = make(chunk.request_id, index)
            stream.replay(state)
        if chunk.choices and not stream.ended:
            made = stream.chunk(chunk.choices[0], "generate_chunk.choices[0]")
        else:
            made = stream.chunk_without_choices()
        if chunk.usage is not None:
            made.usage = stream.usage(chunk.usage)
        return stream, made

    stream, made = await route.run(work, route.size + 8 * len(state.output_token_ids))
    stream_id = state.stream_id or secrets.token_hex(12)
    streams.keep(stream_id, stream)
    after = StreamState(
        output_token_ids=list(stream.ids),
        output_chunk_lens=list(stream.lengths),
        role_sent=state.role_sent or bool(stream.lengths),
        stream_id=stream_id,
    )
    reply = DerenderedChunk(made, after) if isinstance(made, chat.ChatChunk) else DerenderedCompletion(made, after)
    return route.reply(reply, ignored_header([*route.ignored, *stream.ignored]))
