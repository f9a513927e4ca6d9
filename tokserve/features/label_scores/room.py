"""What the room of label scores adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("dialects.openai",),
    endpoints="tokserve.features.label_scores.routes:ENDPOINTS",
)
