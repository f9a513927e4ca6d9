"""Sessions of agents as a trainer reads them: trees of turns as numpy arrays, and sequences with a loss mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .rollouts import Floats, Ids, TokenColumns, packed_array, read_columns

Shared = Literal["once", "all"]
MASKS = ("sampling_mask", "sampling_logprobs", "kept_logprob")


@dataclass(slots=True)
class SessionTurn:
    """A turn.  `prompt_ids`: the whole prompt, the parent's prompt and answer first; `parent`: the number of the turn
    that it continues, None for a root; `continues`: why it is a root, None otherwise.

    `tokens`: what was sampled, with the logprobs of the server's --logprobs-mode.
    """

    turn_id: str
    parent: int | None
    continues: str | None
    prompt_ids: Ids  # int32 [prompt]
    tokens: TokenColumns
    logprobs_mode: str
    model: str
    finish_reason: str
    seed: int
    weight_versions: list[tuple[str, int, int]]
    metadata: dict[str, Any]


@dataclass(slots=True)
class SessionSequence:
    """The ids from a root to a leaf.  `loss_mask`: true for sampled ids that count here; `logprobs`: 0 for others."""

    turns: list[int]
    token_ids: Ids  # int32 [ids]
    loss_mask: NDArray[np.bool_]  # [ids]
    logprobs: Floats  # float32 [ids]


@dataclass(slots=True)
class SessionTree:
    """The turns of a session; a parent comes before its children."""

    session_id: str
    metadata: dict[str, Any]
    turns: list[SessionTurn]
    lease_end: float | None = field(default=None)

    def sequences(self, shared: Shared = "once") -> list[SessionSequence]:
        """A sequence for each leaf.  `shared`: a turn of several leaves counts in the first, or in all."""
        inner = {turn.parent for turn in self.turns}
        counted: set[int] = set()
        rows = []
        for leaf in range(len(self.turns)):
            if leaf in inner:
                continue
            path = self.path(leaf)
            rows.append(self._sequence(path, counted if shared == "once" else set()))
            counted.update(path)
        return rows

    def path(self, number: int) -> list[int]:
        """The numbers of the turns from a root to this one."""
        path = [number]
        while (parent := self.turns[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def _sequence(self, path: list[int], counted: set[int]) -> SessionSequence:
        last = self.turns[path[-1]]
        ids = np.concatenate([last.prompt_ids, last.tokens.token_ids])
        mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
        for number in path:
            turn = self.turns[number]
            start = len(turn.prompt_ids)
            where = slice(start, start + len(turn.tokens.token_ids))
            mask[where], logprobs[where] = number not in counted, turn.tokens.logprobs
        return SessionSequence(path, ids, mask, logprobs)


def read_tree(reply: Mapping[str, Any], lease_end: float | None = None) -> SessionTree:
    """The reply of /sessions/{id}/tree?format=base64, in JSON or msgpack."""
    numbers = {turn["turn_id"]: number for number, turn in enumerate(reply["turns"])}
    turns: list[SessionTurn] = []
    for turn in reply["turns"]:
        parent = None if turn["parent"] is None else numbers[turn["parent"]]
        new = packed_array(turn["new_prompt_ids"], "<i4")
        before = [] if parent is None else [turns[parent].prompt_ids, turns[parent].tokens.token_ids]
        columns = {name: turn[name] for name in MASKS if name in turn}
        columns |= {"token_ids": turn["token_ids"], "logprobs": {"token_logprobs": turn["token_logprobs"]}}
        turns.append(
            SessionTurn(
                turn_id=turn["turn_id"],
                parent=parent,
                continues=turn["continues"],
                prompt_ids=np.concatenate([*before, new]).astype(np.int32),
                tokens=read_columns(columns),
                logprobs_mode=turn["logprobs_mode"],
                model=turn["model"],
                finish_reason=turn["finish_reason"],
                seed=turn["seed"],
                weight_versions=[(one["version"], one["start"], one["end"]) for one in turn["weight_versions"]],
                metadata=turn["metadata"],
            )
        )
    return SessionTree(reply["session_id"], reply["metadata"], turns, lease_end)
