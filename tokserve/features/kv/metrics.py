"""Metrics of the KV store, from what the engine reports of it; vLLM's names where vLLM has the metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokserve.protocol.engine_metric import EngineMetric, Value

OPERATIONS = (
    "saved",
    "written",
    "loaded",
    "read",
    "dropped",
    "failed_writes",
    "damaged",
    "declined",
    "given_up",
    "sent",
    "received",
)


def _of_store(reports: Mapping[str, Any], name: str) -> Any:
    return reports.get("kv_store", {}).get(name, 0)


def _count(name: str) -> Value:
    return lambda reports, _: _of_store(reports, name)


def _blocks(reports: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, float]:
    return {"CPU": _of_store(reports, "memory_blocks"), "STORAGE": _of_store(reports, "file_blocks")}


def _operations(reports: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, float]:
    return {name: _of_store(reports, name) for name in OPERATIONS}


def _bytes(reports: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, float]:
    block_bytes = facts.get("kv_block_bytes", 0)
    return {
        "GPU_to_CPU": _of_store(reports, "saved") * block_bytes,
        "CPU_to_GPU": _of_store(reports, "loaded") * block_bytes,
    }


def _seconds(reports: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, float]:
    return {"GPU_to_CPU": _of_store(reports, "save_seconds"), "CPU_to_GPU": _of_store(reports, "load_seconds")}


METRICS = (
    EngineMetric("gauge", "kv_store_blocks", "KV blocks that the store keeps.", _blocks, "medium"),
    EngineMetric("gauge", "kv_blocks_leased", "KV blocks held for other servers.", _count("leased")),
    EngineMetric(
        "counter", "kv_store_operations", "KV blocks by what became of them in the KV store.", _operations, "operation"
    ),
    EngineMetric(
        "counter", "external_prefix_cache_queries", "Prompt tokens looked up in the KV store.", _count("queries")
    ),
    EngineMetric("counter", "external_prefix_cache_hits", "Prompt tokens loaded from the KV store.", _count("hits")),
    EngineMetric(
        "counter",
        "kv_transfer_failures",
        "Requests whose KV did not come from the other server.",
        _count("failed_transfers"),
    ),
    EngineMetric(
        "counter", "kv_offload_total_bytes", "Bytes copied from the KV cache and to it.", _bytes, "transfer_type"
    ),
    EngineMetric("counter", "kv_offload_total_time", "Seconds that these copies took.", _seconds, "transfer_type"),
)
