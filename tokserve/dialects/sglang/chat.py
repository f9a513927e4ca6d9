"""Chat in this dialect: the prompt as ids, an adapter by its path, and /generate's `meta_info` in each choice."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, UnsetType
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tokserve.base.errors import invalid
from tokserve.client.outputs import ChoiceOutput
from tokserve.dialects.openai import chat, schemas
from tokserve.dialects.openai.tools import ParsedDelta
from tokserve.dialects.sglang.generate import check_routed
from tokserve.dialects.sglang.reply import ChoiceDetails, ReplyForm, matched_stop, version_metadata
from tokserve.server.generation import Usage
from tokserve.server.replies.reply_fields import last_version
from tokserve.server.replies.reply_parts import DeferredParts
from tokserve.server.serving import Serving


class SglangChatBody(schemas.ChatBody):
    """Chat's body, with SGLang's own fields."""

    input_ids: list[int] | None = None
    lora_path: str | None = None
    return_meta_info: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0)] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    @property
    def separates_reasoning(self) -> bool:
        """False: reasoning is content, as the model wrote it."""
        return self.separate_reasoning is not False


async def chat_completions(serving: Serving, request: Request) -> Response:
    """POST /v1/chat/completions: a chat completion; `input_ids` are a prompt, choices have `meta_info`"""
    call = await schemas.read_body(serving, request, SglangChatBody)
    body = call.body
    schemas.check_stream(body, call.wants_msgpack)
    if body.lora_path is not None:
        await serving.model.find(body.lora_path)
        body.model = body.lora_path
    if body.return_meta_info:
        if body.stream:
            raise invalid("return_meta_info", "cannot be streamed")
        body.logprobs_mode = body.logprobs_mode or "temperature"
    if body.return_routed_experts:
        check_routed(serving)
        body.routed_experts_prompt_start = body.routed_experts_start_len or body.routed_experts_prompt_start
    source = "messages" if body.input_ids is None else "input_ids"
    return await chat.respond(await chat.call_of(call, source), SglangChatRenderer)


class SglangChatRenderer(chat.ChatRenderer):
    """Chat's answer with what /generate says of each choice.  Content is never null: miles reads it beside calls."""

    _held: dict[int, str] | None = None  # reasoning of choices that is sent when it is complete

    def usage(self, later_tokens: int = 0) -> Usage:
        """Tokens so far, with those of reasoning where SGLang has them."""
        usage = super().usage(later_tokens)
        usage.reasoning_tokens = (self.reader.reasoning_tokens() if self.reader else UNSET) or 0
        return usage

    def reasoning(self, read: ParsedDelta, index: int, *, is_last: bool) -> str | UnsetType:
        """The reasoning that is sent with a delta: all of it at its end, if it is not to be streamed."""
        body = self.body
        assert isinstance(body, SglangChatBody)
        shown = super().reasoning(read, index, is_last=is_last)
        if body.stream_reasoning is not False:
            return shown
        self._held = self._held or {}
        thought = self._held.pop(index, "") + (shown or "")
        if is_last or read.content or read.calls:
            return thought or UNSET
        self._held[index] = thought
        return UNSET

    def reply(self, completions: list[ChoiceOutput], parts: DeferredParts | None = None) -> chat.ChatReply:
        body, generation = self.body, self.generation
        assert isinstance(body, SglangChatBody)
        reply = super().reply(completions, parts)
        reply.metadata = version_metadata(completions[0])
        for choice, completion in zip(reply.choices, completions, strict=True):
            choice.message.content = choice.message.content or ""
            choice.matched_stop = matched_stop(completion)
            if body.return_prompt_token_ids:
                choice.prompt_token_ids = generation.prompt_ids()
            if body.return_meta_info:
                routed_start = 0 if body.return_routed_experts else None
                form = ReplyForm(bool(body.logprobs), None, body.top_logprobs or 0, False, False, False, routed_start)
                details = ChoiceDetails(form, lambda token_id: None, len(generation.prompt_ids()))
                details.add(completion)
                if self.reader is not None:
                    details.reasoning_tokens = self.reader.reasoning_tokens(completion.index) or 0
                version = last_version([completion]) or ""
                choice.meta_info = details.details(generation.key, completion.times[2], version)
        return reply

    def end(self, choice: chat.ChunkChoice, delta: ChoiceOutput) -> None:
        super().end(choice, delta)
        choice.matched_stop = matched_stop(delta)
