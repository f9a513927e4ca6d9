"""What OpenAI's dialect adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=(
        "features.beams",
        "features.chat",
        "features.grammar",
        "features.images",
        "features.speculation",
    ),
    endpoints="tokserve.dialects.openai.routes:ENDPOINTS",
    text_endpoints="tokserve.dialects.openai.text_routes:ENDPOINTS",
    messages="tokserve.dialects.openai.inline_messages:make_reader",
    schemas="tokserve.dialects.openai.openapi_schemas:narrow",
    paths=(
        "/v1/chat/completions",
        "/v1/chat/completions/tokens",
        "/v1/responses",
        "/v1/responses/{id}",
        "/v1/responses/{id}/input_items",
        "/v1/responses/{id}/cancel",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/responses/render",
        "/v1/chat/completions/derender",
        "/v1/completions/derender",
        "/tokenizer_info",
        "/tokenize",
        "/detokenize",
    ),
)
