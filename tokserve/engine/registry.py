"""Which requests are in flight: by their own id, by the client's id of their submission, by group and by front end.

The one authority on ids for all front ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tokserve.engine.request import Request, State

WaitsFor = Callable[[Request], str | None]
ENDED_KEPT = 10_000  # ended submissions whose client's ids an abort still finds


@dataclass(slots=True)
class Submission:
    """What came in one `Submit` and has not ended.  `request_id`: the client's id; `requests`: by their own."""

    request_id: str
    group_id: str | None
    requests: dict[str, Request]

    def summary(self, now: float, waits_for: WaitsFor) -> dict[str, Any]:
        """What operators see: the choices that have not ended, for how long, and what they wait for; no tokens.

        `state`: running if a choice has a slot, else preempted if one has had it, else waiting; `waits_for`: what the
        first choice without a slot waits for, None if one has a slot.  `prompt_tokens` is of the longest prompt,
        `cached_tokens` and `output_tokens` are sums, `age` and `queued` (None: still) are seconds.
        """
        requests = list(self.requests.values())
        running = sum(request.state is State.RUNNING for request in requests)
        admitted = [request.history.admitted for request in requests if request.history.admitted is not None]
        received = min(request.history.received for request in requests)
        return {
            "request_id": self.request_id,
            "group_id": self.group_id,
            "state": "running" if running else "preempted" if admitted else "waiting",
            "waits_for": None if running else next(filter(None, map(waits_for, requests)), None),
            "choices": len(requests),
            "running": running,
            "age": now - received,
            "queued": min(admitted) - received if admitted else None,
            "prompt_tokens": max(request.prompt_len for request in requests),
            "cached_tokens": sum(request.history.cached_tokens or 0 for request in requests),
            "output_tokens": sum(request.num_output for request in requests),
            "max_tokens": max(request.limit - request.prompt_len for request in requests),
            "priority": min(request.options.priority for request in requests),
        }


class Registry:
    """All requests that have not ended.  An id, of a request or of a submission, is there once."""

    def __init__(self) -> None:
        self._by_choice: dict[str, Submission] = {}  # by the requests' own ids
        self._submissions: dict[str, Submission] = {}
        # hashes of the ids of ended submissions: the ids themselves would be small objects that hold the memory of
        # those that were there with them
        self._ended = np.zeros(ENDED_KEPT, np.int64)
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._by_choice)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in order of receipt."""
        return (submission.requests[choice_id] for choice_id, submission in self._by_choice.items())

    def in_use(self, request_id: str, choice_ids: Iterable[str]) -> bool:
        """Whether the client's id, or that of one of its choices, is taken."""
        return request_id in self._submissions or any(choice_id in self._by_choice for choice_id in choice_ids)

    def add(self, request_id: str, requests: Sequence[Request]) -> None:
        """Register an accepted submission."""
        group_id = requests[0].options.group_id if requests else None
        submission = Submission(request_id, group_id, {request.request_id: request for request in requests})
        self._submissions[request_id] = submission
        for choice_id in submission.requests:
            self._by_choice[choice_id] = submission

    def remove(self, request: Request) -> None:
        """A request has ended; with the last of its submission, the client's id is free again."""
        submission = self._by_choice.pop(request.request_id)
        del submission.requests[request.request_id]
        if submission.requests:
            return
        request_id = submission.request_id
        del self._submissions[request_id]
        self._ended[self._num_ended % len(self._ended)] = hash(request_id)
        self._num_ended += 1

    def get(self, choice_id: str, owner: bytes) -> Request | None:
        """A request by its own id, if the front end `owner` sent it."""
        submission = self._by_choice.get(choice_id)
        request = None if submission is None else submission.requests[choice_id]
        return request if request is not None and request.owner == owner else None

    def request_ids(self, group_id: str | None = None) -> list[str]:
        """The client's ids of a group, or all."""
        return [
            request_id
            for request_id, submission in self._submissions.items()
            if group_id in (None, submission.group_id)
        ]

    def requests(self, request_id: str) -> list[Request]:
        submission = self._submissions.get(request_id)
        return [] if submission is None else list(submission.requests.values())

    def owned_by(self, owner: bytes) -> list[Request]:
        """The requests of a front end."""
        return [request for request in self if request.owner == owner]

    def has_ended(self, request_id: str) -> bool:
        """Whether the client's id was in use recently."""
        return bool((self._ended[: self._num_ended] == hash(request_id)).any())

    def summary(self, limit: int, now: float, waits_for: WaitsFor) -> dict[str, Any]:
        """The first `limit` submissions, in order of receipt; `now`: by the clock of `Request.received`; `waits_for`:
        what keeps a request from running."""
        submissions = self._submissions.values()
        return {
            "total": len(submissions),
            "requests": [submission.summary(now, waits_for) for submission in islice(submissions, limit)],
        }
