"""Completions in this dialect: each choice says what its output ended with (`matched_stop`)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokserve.client.outputs import ChoiceOutput
from tokserve.dialects.openai import completions
from tokserve.dialects.sglang.reply import matched_stop, version_metadata
from tokserve.server.replies.reply_parts import DeferredParts
from tokserve.server.serving import Serving


async def text_completions(serving: Serving, request: Request) -> Response:
    """POST /v1/completions: text or ids in, text out; choices have `matched_stop`"""
    return await completions.respond(serving, request, SglangCompletionRenderer)


class SglangCompletionRenderer(completions.CompletionRenderer):
    """Completions with what each ended with."""

    def reply(self, ends: list[ChoiceOutput], parts: DeferredParts | None = None) -> completions.CompletionReply:
        reply = super().reply(ends, parts)
        reply.metadata = version_metadata(ends[0])
        return reply

    def _choice(self, c: ChoiceOutput, parts: DeferredParts | None = None) -> completions.CompletionChoice:
        choice = super()._choice(c, parts)
        if c.finish_reason is not None:
            choice.matched_stop = matched_stop(c)
        return choice
