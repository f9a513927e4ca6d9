"""The room of clients that share the engine: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    engine="tokserve.features.fairness.engine:Fairness",
    metrics="tokserve.features.fairness.metrics:METRICS",
)
