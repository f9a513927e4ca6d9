"""What the room of groups adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(engine="tokserve.features.groups.prompt_ends:make", runner="tokserve.features.groups.block_copies:make")
