"""Which requests there are: by their own id, by the client's id that they came under, by group and by front end.

The one authority on ids for all front ends.  Knows nothing of what requests do; the core says when one has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokserve.engine.request import Request

ENDED_KEPT = 10_000  # keys of ended submissions that an abort still finds


@dataclass(slots=True)
class Submission:
    """What came in one `Submit` and has not ended, by rid."""

    key: str
    group: str
    requests: dict[str, Request]


class Registry:
    """All requests that have not ended.  A key, or a rid, is there once."""

    def __init__(self) -> None:
        self._by_rid: dict[str, Submission] = {}
        self._by_key: dict[str, Submission] = {}
        self._groups: dict[str, dict[str, Submission]] = {}  # group -> by key
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in order of receipt."""
        return (submission.requests[rid] for rid, submission in self._by_rid.items())

    def in_use(self, key: str, rids: Iterable[str]) -> bool:
        """Whether the key or one of the rids is taken."""
        return key in self._by_key or any(rid in self._by_rid for rid in rids)

    def add(self, key: str, group: str, requests: Sequence[Request]) -> None:
        """Enter what was accepted."""
        submission = Submission(key, group, {request.rid: request for request in requests})
        self._by_key[key] = submission
        for rid in submission.requests:
            self._by_rid[rid] = submission
        if group:
            self._groups.setdefault(group, {})[key] = submission

    def remove(self, request: Request) -> None:
        """A request has ended; with the last of its submission, the key is free again."""
        submission = self._by_rid.pop(request.rid)
        del submission.requests[request.rid]
        if submission.requests:
            return
        key, group = submission.key, submission.group
        del self._by_key[key]
        if group:
            del self._groups[group][key]
            if not self._groups[group]:
                del self._groups[group]
        self._ended[key] = None
        self._ended.move_to_end(key)
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def find(self, rid: str, owner: bytes) -> Request | None:
        """A request of this front end."""
        submission = self._by_rid.get(rid)
        request = None if submission is None else submission.requests[rid]
        return request if request is not None and request.owner == owner else None

    def keys(self, group: str | None = None) -> list[str]:
        """The keys of a group, or all."""
        return list(self._by_key if group is None else self._groups.get(group, ()))

    def submissions(self) -> Collection[Submission]:
        """All that have not ended, in order of receipt."""
        return self._by_key.values()

    def under(self, key: str) -> list[Request]:
        """The requests of a key."""
        submission = self._by_key.get(key)
        return [] if submission is None else list(submission.requests.values())

    def of(self, owner: bytes) -> list[Request]:
        """The requests of a front end."""
        return [request for request in self if request.owner == owner]

    def has_ended(self, key: str) -> bool:
        """Whether the key was in use recently."""
        return key in self._ended
