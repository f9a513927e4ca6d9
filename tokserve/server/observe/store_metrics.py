"""Prometheus metrics of the KV store, from the engine's statistics; vLLM's names where vLLM has the metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tokserve.client.outputs import StoreStats

OPERATIONS = (
    "saved", "written", "loaded", "read", "dropped", "failed_writes", "damaged", "declined", "given_up",
    "sent", "received",
)  # fmt: skip


def families(
    stats: StoreStats, block_bytes: int, prefix: str, names: Sequence[str], values: Sequence[str]
) -> Iterator[Metric]:
    """The metrics, under names with this prefix; `names` and `values` of the labels that every sample has."""
    blocks = GaugeMetricFamily(prefix + "kv_store_blocks", "KV blocks that the store keeps.", labels=[*names, "medium"])
    blocks.add_metric([*values, "CPU"], stats.memory_blocks)
    blocks.add_metric([*values, "STORAGE"], stats.file_blocks)
    yield blocks
    leased = GaugeMetricFamily(prefix + "kv_blocks_leased", "KV blocks held for other servers.", labels=names)
    leased.add_metric(values, stats.leased)
    yield leased
    for name, text, value in (
        ("external_prefix_cache_queries", "Prompt tokens looked up in the KV store.", stats.queries),
        ("external_prefix_cache_hits", "Prompt tokens loaded from the KV store.", stats.hits),
        ("kv_transfer_failures", "Requests whose KV did not come from the other server.", stats.failed_transfers),
    ):
        counter = CounterMetricFamily(prefix + name, text, labels=names)
        counter.add_metric(values, value)
        yield counter
    text = "KV blocks by what became of them in the KV store."
    operations = CounterMetricFamily(prefix + "kv_store_operations", text, labels=[*names, "operation"])
    for operation in OPERATIONS:
        operations.add_metric([*values, operation], getattr(stats, operation))
    yield operations
    for name, text, saves, loads in (
        (
            "kv_offload_total_bytes", "Bytes copied from the KV cache and to it.", stats.saved * block_bytes,
            stats.loaded * block_bytes,
        ),
        ("kv_offload_total_time", "Seconds that these copies took.", stats.save_seconds, stats.load_seconds),
    ):  # fmt: skip
        copies = CounterMetricFamily(prefix + name, text, labels=[*names, "transfer_type"])
        copies.add_metric([*values, "GPU_to_CPU"], saves)
        copies.add_metric([*values, "CPU_to_GPU"], loads)
        yield copies
