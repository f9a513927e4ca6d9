"""What the benchmarks add to the command line."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.offline",),
    parts={
        "add_commands": "tokserve.bench.cli:add_bench",
        "run": "tokserve.bench.cli:bench",
    },
)
