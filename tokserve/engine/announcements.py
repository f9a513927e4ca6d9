"""Requests that front ends prepare: known by the client's id before they are submitted, so that an abort finds them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from tokserve.protocol.messages import Announce


@dataclass(slots=True)
class AnnouncedRequest:
    """What is to come.  `ended`: why it was aborted."""

    request_id: str
    group_id: str | None
    ended: str | None = None


class Announcements:
    """The requests that front ends prepare.  An id may be there twice: who gets it is decided when one comes."""

    def __init__(self) -> None:
        self._announced: dict[tuple[bytes, int], AnnouncedRequest] = {}  # by front end and number

    def add(self, identity: bytes, announce: Announce) -> None:
        """A front end prepares a request."""
        self._announced[identity, announce.number] = AnnouncedRequest(announce.request_id, announce.group_id)

    def remove(self, identity: bytes, number: int) -> None:
        """No more will come of this number."""
        self._announced.pop((identity, number), None)

    def leave(self, identity: bytes) -> None:
        """A front end has gone."""
        self._announced = {key: request for key, request in self._announced.items() if key[0] != identity}

    def request_ids(self, group_id: str | None = None) -> list[str]:
        """The client's ids of a group, or all, that were not aborted."""
        return [
            request.request_id
            for request in self._announced.values()
            if request.ended is None and group_id in (None, request.group_id)
        ]

    def abort(self, request_ids: Container[str], reason: str) -> set[str]:
        """End what comes of these ids; returns those that were there and not aborted yet."""
        aborted = [
            request
            for request in self._announced.values()
            if request.ended is None and request.request_id in request_ids
        ]
        for request in aborted:
            request.ended = reason
        return {request.request_id for request in aborted}

    def aborted_ids(self) -> set[str]:
        return {request.request_id for request in self._announced.values() if request.ended is not None}

    def ended(self, identity: bytes, number: int) -> str | None:
        """Why the request of this number was aborted, if it was."""
        request = self._announced.get((identity, number))
        return None if request is None else request.ended
