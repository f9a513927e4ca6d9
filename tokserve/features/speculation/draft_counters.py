"""What an engine counts of drafts since its start."""

from __future__ import annotations

from typing import Any


class DraftCounters:
    """Steps of requests with drafts, drafts, accepted drafts by their position in the row, and by source both."""

    __slots__ = ("accepted_at", "by_source", "num_drafts", "num_steps")

    def __init__(self) -> None:
        self.num_steps = self.num_drafts = 0
        self.accepted_at: list[int] = []
        self.by_source: dict[str, tuple[int, int]] = {}

    def record(self, source: str, drafts: int, accepted: int) -> None:
        """A row had drafts, of which so many were accepted."""
        self.num_steps += 1
        self.num_drafts += drafts
        before = self.by_source.get(source, (0, 0))
        self.by_source[source] = before[0] + drafts, before[1] + accepted
        at = self.accepted_at
        if accepted > len(at):
            at += [0] * (accepted - len(at))
        for index in range(accepted):
            at[index] += 1

    def values(self) -> dict[str, Any]:
        """A copy, by the names that the room's metrics read."""
        return {
            "draft_steps": self.num_steps,
            "draft_tokens": self.num_drafts,
            "accepted_by_position": self.accepted_at.copy(),
            "drafts_by_source": self.by_source.copy(),
        }
