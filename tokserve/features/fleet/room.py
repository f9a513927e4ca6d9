"""The room of several engines and of several API processes: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.observe",),
    parts={
        "replicas": "tokserve.features.fleet.replicas:Replicas",
        "supervisor": "tokserve.features.fleet.supervisor:Supervisor",
    },
)
