"""Metrics of clients that share the engine."""

from __future__ import annotations

from tokserve.protocol.engine_metric import EngineMetric, reported

METRICS = (EngineMetric("gauge", "clients", "Clients that have requests.", reported("clients")),)
