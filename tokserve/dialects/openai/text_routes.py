"""OpenAI's routes that need a tokenizer, and those that render and tokenize."""

from __future__ import annotations

from tokserve.dialects.openai import chat, completions, render, responses, schemas, tokenize
from tokserve.dialects.openai.derender import bodies, handlers, streams
from tokserve.server.endpoint import MISSING, PROMPT, Endpoint

POST, GET = ("POST",), ("GET",)
CHAT = schemas.ChatBody
ENDPOINTS = (
    Endpoint(POST, "/v1/chat/completions", chat.chat, CHAT, text=True, reply=chat.ChatReply, runner="generate"),
    Endpoint(
        POST, "/v1/chat/completions/tokens", chat.chat_tokens, CHAT, text=True, reply=chat.ChatReply, runner="generate"
    ),
    Endpoint(
        POST,
        "/v1/responses",
        responses.create_response,
        schemas.ResponsesBody,
        text=True,
        reply=responses.ResponsesReply,
        runner="generate",
    ),
    Endpoint(("GET", "DELETE"), "/v1/responses/{id}", responses.stored, text=True, raises=MISSING),
    Endpoint(GET, "/v1/responses/{id}/input_items", responses.stored, text=True, raises=MISSING),
    Endpoint(POST, "/v1/responses/{id}/cancel", responses.stored, text=True, raises=MISSING),
    Endpoint(
        POST, "/v1/chat/completions/render", render.render_chat, CHAT, text=True, reply=render.Rendered, raises=PROMPT
    ),
    Endpoint(
        POST,
        "/v1/responses/render",
        render.render_responses,
        schemas.ResponsesBody,
        text=True,
        reply=render.Rendered,
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/v1/completions/render",
        render.render_completions,
        schemas.CompletionBody,
        text=True,
        reply=list[render.Rendered],
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/v1/chat/completions/derender",
        handlers.derender_chat,
        bodies.DerenderChatBody,
        text=True,
        reply=(chat.ChatReply, streams.DerenderedChunk),
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/v1/completions/derender",
        handlers.derender_completions,
        bodies.DerenderCompletionBody,
        text=True,
        reply=(completions.CompletionReply, streams.DerenderedCompletion),
        raises=PROMPT,
    ),
    Endpoint(GET, "/tokenizer_info", render.describe, text=True, reply=render.TokenizerDescription),
    Endpoint(
        POST,
        "/tokenize",
        tokenize.tokenize,
        schemas.TokenizeBody,
        text=True,
        reply=tokenize.TokenizeReply,
        raises=PROMPT,
    ),
    Endpoint(
        POST,
        "/detokenize",
        tokenize.detokenize,
        schemas.DetokenizeBody,
        text=True,
        reply=tokenize.DetokenizeReply,
        raises=PROMPT,
    ),
)
