"""Chat in this dialect: the prompt as ids, an adapter by its path, and /generate's `meta_info` in each choice."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokserve.client.outputs import ChoiceOutput
from tokserve.errors import invalid
from tokserve.server.http.body import wants_msgpack
from tokserve.server.openai import chat, schemas
from tokserve.server.replies.reply_fields import last_version
from tokserve.server.replies.reply_parts import DeferredParts
from tokserve.server.serving import Serving
from tokserve.server.sglang.reply import ChoiceDetails, ReplyForm, matched_stop


class SglangChatBody(schemas.ChatBody):
    """Chat's body, with SGLang's own fields."""

    input_ids: list[int] | None = None
    lora_path: str | None = None
    return_meta_info: bool | None = None
    return_prompt_token_ids: bool | None = None


async def chat_completions(serving: Serving, request: Request) -> Response:
    """POST /v1/chat/completions: a chat completion; `input_ids` are a prompt, choices have `meta_info`"""
    body, ignored, size = await schemas.read(serving, request, SglangChatBody)
    schemas.check_stream(body, wants_msgpack(request))
    if body.lora_path is not None:
        await serving.find_model(body.lora_path)
        body.model = body.lora_path
    if body.return_meta_info:
        if body.stream:
            raise invalid("return_meta_info", "cannot be streamed")
        body.logprobs_mode = body.logprobs_mode or "temperature"
    source = "messages" if body.input_ids is None else "input_ids"
    call = await chat.call_of(serving, request, body, ignored, size, source)
    return await chat.respond(serving, request, call, SglangChatRenderer)


class SglangChatRenderer(chat.ChatRenderer):
    """Chat's answer with what /generate says of each choice.  Content is never null: miles reads it beside calls."""

    def reply(self, completions: list[ChoiceOutput], parts: DeferredParts | None = None) -> chat.ChatReply:
        body, generation = self.body, self.generation
        assert isinstance(body, SglangChatBody)
        reply = super().reply(completions, parts)
        for choice, completion in zip(reply.choices, completions, strict=True):
            choice.message.content = choice.message.content or ""
            choice.matched_stop = matched_stop(completion)
            if body.return_prompt_token_ids:
                choice.prompt_token_ids = generation.prompt_ids()
            if body.return_meta_info:
                form = ReplyForm(bool(body.logprobs), None, body.top_logprobs or 0, False, False, False)
                details = ChoiceDetails(form, lambda token_id: None, len(generation.prompt_ids()))
                details.add(completion)
                version = last_version([completion]) or ""
                choice.meta_info = details.details(generation.key, completion.times[2], version)
        return reply

    def end(self, choice: chat.ChunkChoice, delta: ChoiceOutput) -> None:
        super().end(choice, delta)
        choice.matched_stop = matched_stop(delta)
