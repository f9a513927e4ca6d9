"""The room of KV blocks outside the cache: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("rl",),
    engine="tokserve.features.kv.external_kv:make",
    runner="tokserve.features.kv.kv_copies:make",
    parts={"check_transfer": "tokserve.features.kv.transfer_check:check_transfer"},
    metrics="tokserve.features.kv.metrics:METRICS",
    columns="tokserve.features.kv.transfer_check:SPECS",
)
