"""The room of GGUF files: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("families.quantization",),
    model_files="tokserve.families.gguf.config:GGUF",
    parts={"format": "tokserve.families.gguf.format:GgufFormat"},
)
