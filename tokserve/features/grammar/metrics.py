"""Metrics of compiled grammars."""

from __future__ import annotations

from tokserve.protocol.engine_metric import EngineMetric, reported

METRICS = (
    EngineMetric(
        "gauge",
        "grammar_cache_bytes",
        "Memory of the compiled grammars that are kept, estimated.",
        reported("grammar_bytes"),
    ),
    EngineMetric("gauge", "grammars_compiling", "Grammars that requests wait for.", reported("grammars_compiling")),
    EngineMetric("counter", "grammar_refusals", "Grammars refused after a trial.", reported("grammar_refusals")),
)
