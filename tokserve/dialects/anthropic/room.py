"""What Anthropic's dialect adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("dialects.openai", "features.chat", "features.images"),
    text_endpoints="tokserve.dialects.anthropic.routes:ENDPOINTS",
    errors="tokserve.dialects.anthropic.error_shape:ANTHROPIC",
    schemas="tokserve.dialects.anthropic.openapi_schemas:narrow",
    paths=(
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
    ),
)
