"""What the room of conversations adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.images",),
    text_start="tokserve.features.chat.text_context:check_start",
    parts={
        "template": "tokserve.features.chat.chat:ChatTemplate",
        "read_prompt": "tokserve.features.chat.prompts:read_for_generation",
    },
)
