"""Metrics of drafts, with the names of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.protocol.engine_metric import EngineMetric, Value, reported


def _at(index: int) -> Value:
    """Drafts by source (0), or accepted drafts by source (1)."""
    return lambda reports, _: {name: counts[index] for name, counts in reports.get("drafts_by_source", {}).items()}


def _by_position(reports: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, float]:
    return {str(position): count for position, count in enumerate(reports.get("accepted_by_position", ()))}


METRICS = (
    EngineMetric("counter", "spec_decode_num_drafts", "Steps of requests that had drafts.", reported("draft_steps")),
    EngineMetric("counter", "spec_decode_num_draft_tokens", "Drafts.", reported("draft_tokens")),
    EngineMetric(
        "counter",
        "spec_decode_num_accepted_tokens",
        "Drafts that were accepted.",
        lambda reports, _: sum(reports.get("accepted_by_position", ())),
    ),
    EngineMetric(
        "counter",
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were accepted, by their position.",
        _by_position,
        "position",
    ),
    EngineMetric(
        "counter",
        "spec_decode_num_draft_tokens_by_source",
        "Drafts, by where they came from.",
        _at(0),
        "source",
    ),
    EngineMetric(
        "counter",
        "spec_decode_num_accepted_tokens_by_source",
        "Drafts that were accepted, by where they came from.",
        _at(1),
        "source",
    ),
)
