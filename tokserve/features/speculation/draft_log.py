"""What was drafted for one request, step by step, if it wants to be told: two bytes a step."""

from __future__ import annotations

from tokserve.protocol.messages import DraftCounts


class DraftLog:
    """Drafts and accepted ones of one request, by source and by step."""

    __slots__ = ("_by_source", "_per_step")

    def __init__(self) -> None:
        self._by_source: dict[str, tuple[int, int]] = {}
        self._per_step = bytearray()

    def record(self, source: str, proposed: int, accepted: int) -> None:
        """A step had `proposed` drafts from `source`, up to `config.speculation.MAX_DRAFTS`."""
        before = self._by_source.get(source, (0, 0))
        self._by_source[source] = before[0] + proposed, before[1] + accepted
        self._per_step += bytes((proposed, accepted))

    def added_to(self, counts: DraftCounts) -> DraftCounts:
        """The counts with what is recorded here."""
        return counts._replace(by_source=self._by_source, per_step=bytes(self._per_step))
