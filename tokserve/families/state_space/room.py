"""The room of state-space layers: the core finds its families in the registry, and it adds nothing else."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(requires=("families.mixtures", "families.recurrent"))
