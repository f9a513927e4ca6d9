"""Prometheus metrics of the KV store, from the engine's statistics; vLLM's names where vLLM has the metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tokserve.client.outputs import StoreStats

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


Labelled = Sequence[tuple[Sequence[str], StoreStats, float]]


def families(stores: Labelled, prefix: str, names: Sequence[str]) -> Iterator[Metric]:
    """The metrics, under names with this prefix.  `stores`, for each engine: the values of the labels `names`, the
    statistics, and the bytes of a block."""
    blocks = GaugeMetricFamily(prefix + "kv_store_blocks", "KV blocks that the store keeps.", labels=[*names, "medium"])
    leased = GaugeMetricFamily(prefix + "kv_blocks_leased", "KV blocks held for other servers.", labels=names)
    text = "KV blocks by what became of them in the KV store."
    operations = CounterMetricFamily(prefix + "kv_store_operations", text, labels=[*names, "operation"])
    for values, stats, _ in stores:
        blocks.add_metric([*values, "CPU"], stats.memory_blocks)
        blocks.add_metric([*values, "STORAGE"], stats.file_blocks)
        leased.add_metric(values, stats.leased)
        for operation in OPERATIONS:
            operations.add_metric([*values, operation], getattr(stats, operation))
    yield from (blocks, leased, operations)
    for field, name, text in (
        ("queries", "external_prefix_cache_queries", "Prompt tokens looked up in the KV store."),
        ("hits", "external_prefix_cache_hits", "Prompt tokens loaded from the KV store."),
        ("failed_transfers", "kv_transfer_failures", "Requests whose KV did not come from the other server."),
    ):
        counter = CounterMetricFamily(prefix + name, text, labels=names)
        for values, stats, _ in stores:
            counter.add_metric(values, getattr(stats, field))
        yield counter
    yield from _copies(stores, prefix, [*names, "transfer_type"])


def _copies(stores: Labelled, prefix: str, names: Sequence[str]) -> Iterator[Metric]:
    text = "Bytes copied from the KV cache and to it."
    size = CounterMetricFamily(prefix + "kv_offload_total_bytes", text, labels=names)
    time = CounterMetricFamily(prefix + "kv_offload_total_time", "Seconds that these copies took.", labels=names)
    for values, stats, block_bytes in stores:
        size.add_metric([*values, "GPU_to_CPU"], stats.saved * block_bytes)
        size.add_metric([*values, "CPU_to_GPU"], stats.loaded * block_bytes)
        time.add_metric([*values, "GPU_to_CPU"], stats.save_seconds)
        time.add_metric([*values, "CPU_to_GPU"], stats.load_seconds)
    yield from (size, time)
