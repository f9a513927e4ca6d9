"""What the room of models that pool adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    endpoints="tokserve.features.pooling.routes.table:ENDPOINTS",
    engine="tokserve.features.pooling.engine:PairedTexts",
    runner="tokserve.features.pooling.vectors:make",
    columns="tokserve.features.pooling.columns:SPECS",
)
