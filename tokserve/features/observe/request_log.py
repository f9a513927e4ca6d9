"""--log-requests: logs a line when a request is accepted or refused, and a line when it ends.

The lines have counts and times, never prompts or outputs.  `log` adds the request's id.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from tokserve.base.errors import RequestError
from tokserve.client.outputs import ChoiceOutput
from tokserve.protocol.params import SamplingParams
from tokserve.server.generation import Generation
from tokserve.server.observer import Observer

logger = logging.getLogger(__name__)


class RequestLog(Observer):
    """Observes one request and logs it."""

    def __init__(self) -> None:
        self._generation: Generation | None = None
        self._reasons: Counter[str] = Counter()
        self._queued = self._first = self._total = 0.0

    def accepted(self, generation: Generation, params: SamplingParams | None) -> None:
        self._generation = generation
        usage = generation.usage()
        _log_event(
            "accepted",
            prompts=len(generation.streams),
            prompt_tokens=usage.prompt_tokens,
            n=None if params is None else params.n,
            max_tokens=None if params is None else params.max_tokens,
        )

    def refused(self, error: RequestError) -> None:
        """Log a refusal, the only line of the request."""
        _log_event("refused", status=error.status, code=error.code, field=error.field)

    def finished(self, completion: ChoiceOutput, prompt_tokens: int, output_tokens: int) -> None:
        """Count for the last line."""
        self._reasons[completion.stop_detail or completion.finish_reason or "error"] += 1
        queued, first, total = completion.times
        self._queued, self._total = max(self._queued, queued), max(self._total, total)
        self._first = min(self._first, first) if self._first and first else self._first or first

    def aborted(self, cause: str, count: int) -> None:
        self._reasons[cause] += count

    def closed(self) -> None:
        """Log the end: why the choices ended, numbers of tokens, and the engine's times in seconds from arrival: until
        the last choice got a slot, the first token came, and the last choice ended; none if no choice has ended."""
        if self._generation is None:
            return
        usage = self._generation.usage()
        queued, first, total = (
            round(seconds, 6) if self._total else None for seconds in (self._queued, self._first, self._total)
        )
        _log_event(
            "ended",
            reasons=dict(self._reasons),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            output_tokens=usage.completion_tokens,
            queued=queued,
            first_token=first,
            total=total,
        )


def _log_event(event: str, **fields: Any) -> None:
    words = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)
    logger.info("request %s: %s", event, words, extra={"fields": {"event": f"request_{event}"} | fields})


def _shown(value: Any) -> str:
    return ",".join(f"{name}:{count}" for name, count in value.items()) if isinstance(value, dict) else str(value)
