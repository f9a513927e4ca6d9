"""The room of KV blocks outside the cache: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(engine="tokserve.features.kv.external_kv:make", columns="tokserve.features.kv.transfer_check:SPECS")
