"""What the room of conversations adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(text_start="tokserve.features.chat.text_context:check_start")
