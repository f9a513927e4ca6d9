"""The room of transformers' modules: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    parts={
        "with_architecture": "tokserve.families.hf.config:with_architecture",
        "load": "tokserve.families.hf.load:load_module",
    },
)
