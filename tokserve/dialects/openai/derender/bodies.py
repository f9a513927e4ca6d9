"""The bodies of derender's routes, and the parts of generate replies that they read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokserve.dialects.openai.schemas import RequestBody
from tokserve.server.replies.reply_metrics import ReplyMetrics

Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class DerenderBody(RequestBody):
    """The fields of both bodies.  With `stream`, a chunk of a stream is derendered, and not whole replies."""

    stream: bool | None = None
    generate_chunk: Any = None
    stream_state: Any = None


class DerenderChatBody(DerenderBody):
    """The body of /v1/chat/completions/derender."""

    generate_response: Any = None
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
