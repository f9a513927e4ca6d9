"""Metrics of recurrent states."""

from __future__ import annotations

from tokserve.protocol.engine_metric import EngineMetric, reported

METRICS = (
    EngineMetric(
        "gauge", "recurrent_state_snapshots", "Snapshots of recurrent states that are kept.", reported("snapshots")
    ),
    EngineMetric(
        "gauge",
        "recurrent_state_bytes",
        "Memory reserved for recurrent states and snapshots of them.",
        lambda _, facts: facts.get("state_bytes", 0),
    ),
)
