"""Mixtures of experts."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(columns="tokserve.families.mixtures.columns:SPECS")
