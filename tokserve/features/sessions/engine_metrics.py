"""Metrics of the blocks that are kept for sessions."""

from __future__ import annotations

from tokserve.protocol.engine_metric import EngineMetric, reported

METRICS = (
    EngineMetric(
        "gauge",
        "session_blocks",
        "Blocks of the KV cache that are kept for open sessions.",
        reported("session_blocks"),
    ),
    EngineMetric(
        "counter", "session_cache_hits", "Prompt tokens of sessions found in the cache.", reported("session_hits")
    ),
)
