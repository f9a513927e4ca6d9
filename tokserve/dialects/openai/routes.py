"""OpenAI's route that takes token ids too; `text_routes` has the others."""

from __future__ import annotations

from tokserve.dialects.openai import completions, schemas
from tokserve.server.endpoint import Endpoint

ENDPOINTS = (
    Endpoint(
        ("POST",),
        "/v1/completions",
        completions.completions,
        schemas.CompletionBody,
        reply=completions.CompletionReply,
        runner="generate",
    ),
)
