"""The room of images: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("families.mixtures", "families.recurrent"),
    engine="tokserve.features.images.engine:make",
    runner="tokserve.features.images.features:make",
    parts={
        "read_format": "tokserve.features.images.vision:read_format",
        "make_reader": "tokserve.features.images.media.images:make_reader",
        "read_images": "tokserve.features.images.media.images:read_images",
        "prompt_with_images": "tokserve.features.images.request_images:prompt_with_images",
    },
    reserve="tokserve.features.images.server_images:reserve",
)
