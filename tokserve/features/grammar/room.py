"""The room of structured outputs: what it adds to the core."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    engine="tokserve.features.grammar.engine:GrammarFeature",
    metrics="tokserve.features.grammar.metrics:METRICS",
    parameters="tokserve.features.grammar.structured:read_parameter",
)
