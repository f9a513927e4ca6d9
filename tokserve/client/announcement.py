"""`RequestAnnouncement`: a request that engines know of before it is submitted, or between its submissions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Announcer(Protocol):
    """The client of an engine."""

    def tell(self, request_id: str, group_id: str | None) -> int:
        """Tell the engine of a request that is to come; returns the number that its submissions carry."""

    def end_announcement(self, number: int) -> None:
        """Tell the engine that nothing more will come of this number."""


class RequestAnnouncement:
    """An abort of the request reaches these engines until `end`: what is submitted after it ends at once."""

    def __init__(self, engines: Iterable[Announcer], request_id: str, group_id: str | None) -> None:
        self._numbers = {engine: engine.tell(request_id, group_id) for engine in engines}

    def number(self, engine: Announcer) -> int:
        """What a submission to this engine carries."""
        return self._numbers[engine]

    def end(self) -> None:
        """Submit nothing more."""
        for engine, number in self._numbers.items():
            engine.end_announcement(number)
