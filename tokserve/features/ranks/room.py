"""The room of models that several processes compute: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    parts={
        "executor": "tokserve.features.ranks.workers:make_executor",
        "lone": "tokserve.features.ranks.ranks:lone_rank",
        "hold": "tokserve.features.ranks.headless:hold",
    },
)
