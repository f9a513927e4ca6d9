"""What the room of entropies adds."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(columns="tokserve.features.entropy.columns:SPECS")
