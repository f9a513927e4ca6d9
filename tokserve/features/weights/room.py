"""What the room of weight updates adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    endpoints="tokserve.features.weights.weight_routes:ENDPOINTS",
    engine="tokserve.features.weights.commands:make",
)
