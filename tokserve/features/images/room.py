"""The room of images: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    engine="tokserve.features.images.engine:make",
    runner="tokserve.features.images.features:make",
    reserve="tokserve.features.images.server_images:reserve",
)
