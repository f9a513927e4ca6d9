"""What the room of sessions adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=(
        "families.mixtures",
        "features.chat",
        "features.images",
        "features.masks",
    ),
    options="tokserve.features.sessions.options:SessionOptions",
    check="tokserve.features.sessions.options:check_sessions",
    endpoints="tokserve.features.sessions.routes:ENDPOINTS",
    needs="sessions",
    paths=(
        "/sessions",
        "/sessions/next",
        "/sessions/{id}",
        "/sessions/{id}/tree",
        "/sessions/{id}/sequences",
        "/sessions/{id}/close",
        "/sessions/{id}/metadata",
        "/sessions/{id}/v1/chat/completions",
        "/sessions/{id}/v1/responses",
        "/sessions/{id}/v1/messages",
        "/sessions/{id}/v1/messages/count_tokens",
        "/sessions/{id}/v1/models",
        "/sessions/{id}/tokenize",
    ),
    engine="tokserve.features.sessions.kept_blocks:make",
    metrics="tokserve.features.sessions.engine_metrics:METRICS",
    observers="tokserve.features.sessions.metrics:SessionMeasures",
    text_start="tokserve.features.sessions.access:start",
    shared="tokserve.features.sessions.host:make_host",
    conversations="tokserve.features.sessions.hook:make_hook",
)
