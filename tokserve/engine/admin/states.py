"""The engine's life as tables: what each event makes of each state, for generation and, independently, for the weights.

docs/rl.md shows the tables.  An event that a table does not have for a state is a bug, not a client's mistake: commands
check first whether their event is possible, and refuse otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Literal, TypeVar

GenerationState = Literal["running", "pausing", "paused"]
GenerationEvent = Literal["pause", "reached", "resume"]
WeightsState = Literal["loaded", "dropped", "mismatched", "missing", "overwriting", "torn", "broken"]
WeightsEvent = Literal["release", "overwrite", "commit", "roll back", "tear", "mismatch", "confirm"]
S = TypeVar("S", bound=str)
E = TypeVar("E", bound=str)
Table = Mapping[S, Mapping[E, S]]

# `reached`: requests are treated as the pause wants, and no step is in flight; `resume`: the call, or the lease's end
GENERATION: Table[GenerationState, GenerationEvent] = {
    "running": {"pause": "pausing", "resume": "running"},
    "pausing": {"pause": "pausing", "reached": "paused", "resume": "running"},
    "paused": {"pause": "paused", "reached": "paused", "resume": "running"},
}
# loaded: they serve, if nothing else forbids it.  dropped: their memory was released.  mismatched, missing: after a
# failover, those in memory are not those that should be here, and that memory was released.  overwriting: an update
# replaces them in place.  torn: a commit failed halfway, so what is in memory is no version.  broken: neither old nor
# new weights are there.
# `release`: sleep level 2.  `overwrite`: an update goes on in place.  `roll back`: the open update is over without a
# commit.  `tear`: its commit failed.  `mismatch`: a failover could not load what the engine before had.  `confirm`:
# update_weight_version.
WEIGHTS: Table[WeightsState, WeightsEvent] = {
    "loaded": {
        "release": "dropped",
        "overwrite": "overwriting",
        "commit": "loaded",
        "roll back": "loaded",
        "tear": "torn",
        "mismatch": "mismatched",
        "confirm": "loaded",
    },
    "dropped": {
        "release": "dropped",
        "overwrite": "overwriting",
        "commit": "loaded",
        "roll back": "dropped",
        "tear": "broken",
        "mismatch": "missing",
        "confirm": "dropped",
    },
    "mismatched": {
        "release": "missing",
        "overwrite": "overwriting",
        "commit": "loaded",
        "roll back": "mismatched",
        "tear": "torn",
        "mismatch": "mismatched",
        "confirm": "loaded",
    },
    "missing": {
        "release": "missing",
        "overwrite": "overwriting",
        "commit": "loaded",
        "roll back": "missing",
        "tear": "broken",
        "mismatch": "missing",
        "confirm": "missing",
    },
    "overwriting": {"commit": "loaded", "roll back": "broken", "tear": "broken"},
    "torn": {
        "release": "broken",
        "overwrite": "overwriting",
        "commit": "loaded",
        "roll back": "torn",
        "tear": "torn",
        "mismatch": "mismatched",
        "confirm": "torn",
    },
    "broken": {
        "release": "broken",
        "overwrite": "overwriting",
        "commit": "loaded",
        "roll back": "broken",
        "tear": "broken",
        "mismatch": "missing",
        "confirm": "broken",
    },
}


class Region(Generic[S, E]):
    """A state, which events change as the table says."""

    def __init__(self, table: Table[S, E], start: S) -> None:
        self._table = table
        self.state = start

    def fire(self, event: E) -> None:
        """Go where the event leads."""
        self.state = self._table[self.state][event]
