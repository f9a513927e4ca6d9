"""Live requests as an operator wants to see them: what each has, for how long, and what it waits for.

Made when somebody asks and not before; nothing in the loop depends on it.  Tokens and texts are never shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from tokserve.engine.registry import Submission
from tokserve.engine.request import State


def rows(submissions: Iterable[Submission], limit: int, now: float) -> list[dict[str, Any]]:
    """The first `limit` of them; `now` is the clock's that `Request.received` was taken from."""
    return [_row(submission, now) for submission in islice(submissions, limit)]


def _row(submission: Submission, now: float) -> dict[str, Any]:
    """A submission whose choices have not all ended; counts are of those that have not.

    `state`: running if a choice has a slot, else preempted if one has had it, else waiting.  `prompt_tokens` is of the
    longest prompt, `cached_tokens` and `output_tokens` are sums, `age` and `queued` (None: still) are seconds.
    """
    requests = list(submission.requests.values())
    running = sum(request.state is State.RUNNING for request in requests)
    admitted = [request.admitted for request in requests if request.admitted is not None]
    received = min(request.received for request in requests)
    return {
        "request_id": submission.key,
        "group_id": submission.group or None,
        "state": "running" if running else "preempted" if admitted else "waiting",
        "choices": len(requests),
        "running": running,
        "age": now - received,
        "queued": min(admitted) - received if admitted else None,
        "prompt_tokens": max(request.prompt_len for request in requests),
        "cached_tokens": sum(request.cached or 0 for request in requests),
        "output_tokens": sum(request.num_output for request in requests),
        "max_tokens": max(request.limit - request.prompt_len for request in requests),
        "priority": min(request.priority for request in requests),
    }
