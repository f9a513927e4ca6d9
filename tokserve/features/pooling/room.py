"""What the room of models that pool adds to the server."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("dialects.openai", "features.chat"),
    endpoints="tokserve.features.pooling.routes.table:ENDPOINTS",
    parts={
        "with_classifier": "tokserve.features.pooling.head:with_classifier",
        "with_token_ids": "tokserve.features.pooling.classifier:with_token_ids",
    },
    engine="tokserve.features.pooling.engine:PairedTexts",
    runner="tokserve.features.pooling.vectors:make",
    columns="tokserve.features.pooling.columns:SPECS",
)
