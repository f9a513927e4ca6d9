"""The times of a request with one choice, in the shape of vLLM's: `metrics`, with --enable-per-request-metrics."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class TimingFields(msgspec.Struct, kw_only=True):
    """Milliseconds: from a slot to the first token, from that to the last one, in the queue, between two tokens; and
    output tokens per second from the slot on.  Null where there are too few tokens."""

    time_to_first_token_ms: float | UnsetType | None = UNSET
    generation_time_ms: float | UnsetType | None = UNSET
    queue_time_ms: float | UnsetType | None = UNSET
    mean_itl_ms: float | UnsetType | None = UNSET
    tokens_per_second: float | UnsetType | None = UNSET


def set_times(fields: TimingFields, times: tuple[float, float, float], num_tokens: int) -> None:
    """Fill in the fields.  `times`: seconds from arrival to a slot, to the first token (0: none came), to the end."""
    queued, first, total = times
    computed = total - queued
    fields.queue_time_ms = 1000 * queued
    fields.time_to_first_token_ms = 1000 * (first - queued) if first else None
    fields.generation_time_ms = 1000 * (total - first) if first else None
    fields.mean_itl_ms = 1000 * (total - first) / (num_tokens - 1) if first and num_tokens > 1 else None
    fields.tokens_per_second = num_tokens / computed if first and computed > 0 else None
