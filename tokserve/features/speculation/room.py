"""The room of drafts: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    engine="tokserve.features.speculation.engine:make",
    metrics="tokserve.features.speculation.metrics:METRICS",
    runner="tokserve.features.speculation.draft_model:make",
    draft="tokserve.features.speculation.draft_model:load_draft",
    columns="tokserve.features.speculation.columns:SPECS",
)
