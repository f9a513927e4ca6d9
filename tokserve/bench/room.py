"""What the benchmarks add to the command line."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.offline",),
    command_line="tokserve.bench.cli:COMMANDS",
)
