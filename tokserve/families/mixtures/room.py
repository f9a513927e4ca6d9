"""Mixtures of experts."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    requires=("families.quantization",),
    columns="tokserve.families.mixtures.columns:SPECS",
)
