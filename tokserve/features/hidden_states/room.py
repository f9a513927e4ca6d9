"""What the room of hidden states adds."""

from __future__ import annotations

from tokserve.base.rooms import Room

ROOM = Room(
    options="tokserve.features.hidden_states.options:HiddenStateOptions",
    check="tokserve.features.hidden_states.options:check",
    engine="tokserve.features.hidden_states.admission:make",
    runner="tokserve.features.hidden_states.taps:make",
    columns="tokserve.features.hidden_states.columns:SPECS",
)
