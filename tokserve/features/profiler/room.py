"""The room of profiles: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    engine="tokserve.features.profiler.commands:Profiler",
    runner="tokserve.features.profiler.recorder:RunnerProfiler",
)
