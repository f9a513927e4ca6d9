"""The room of recurrent states: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("families.mixtures",),
    engine="tokserve.families.recurrent.engine:make",
    metrics="tokserve.families.recurrent.metrics:METRICS",
)
