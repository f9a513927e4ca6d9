"""What the routes of training frameworks add to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.weights",),
    endpoints="tokserve.dialects.trainers.routes:ENDPOINTS",
)
