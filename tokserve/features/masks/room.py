"""Sampling masks."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    columns="tokserve.features.masks.columns:SPECS",
)
