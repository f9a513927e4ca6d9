"""What Ray adds to the core: places where engines and ranks run."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("features.ranks",),
    parts={
        "prepare": "tokserve.ray.placement:prepare",
        "engine": "tokserve.ray.placement:start_engine",
        "spawn": "tokserve.ray.ray_ranks:RaySpawn",
    },
)
