"""Anthropic's routes."""

from __future__ import annotations

from tokserve.dialects.anthropic import messages
from tokserve.dialects.anthropic.bodies import CountTokensBody, MessagesBody
from tokserve.dialects.anthropic.error_shape import ANTHROPIC
from tokserve.dialects.anthropic.reply import MessagesReply
from tokserve.dialects.openai import render
from tokserve.server.endpoint import PROMPT, Endpoint

POST = ("POST",)
ENDPOINTS = (
    Endpoint(
        POST,
        "/v1/messages",
        messages.create_message,
        MessagesBody,
        text=True,
        reply=MessagesReply,
        errors=ANTHROPIC,
        runner="generate",
    ),
    Endpoint(
        POST,
        "/v1/messages/count_tokens",
        messages.count_tokens,
        CountTokensBody,
        text=True,
        reply=messages.TokenCount,
        errors=ANTHROPIC,
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/v1/messages/render",
        messages.render,
        MessagesBody,
        text=True,
        reply=render.Rendered,
        errors=ANTHROPIC,
        raises=PROMPT,
    ),
)
