"""Prometheus metrics of the engines: a sample per engine, from what each reported last.

The label `engine` is the engine's number, as vLLM's data parallel ranks have it.  Names are vLLM's where vLLM has the
metric.  What the API processes count themselves is in `metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from tokserve.base.rooms import contributions
from tokserve.client.outputs import PREEMPTIONS, STEP_TOKENS, EngineReport, StepStats
from tokserve.config import Config
from tokserve.protocol.engine_metric import EngineMetric

PREFIX = "tokserve:"
LABELS = ["model_name", "engine"]
STATES = ("running", "pausing", "paused", "updating", "sleeping", "quarantined")
AGES = ("0", "1", "2", "3", "4+")

Value = Callable[[StepStats], float]
GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("num_requests_running", "Requests being computed.", lambda s: s.running),
    ("num_requests_waiting", "Requests waiting for a slot.", lambda s: s.waiting),
    (
        "kv_cache_usage_perc",
        "Share of KV pages held by running requests, 0 to 1.",
        lambda s: s.blocks_held / s.blocks_total if s.blocks_total else 0.0,
    ),
    ("kv_cache_blocks_cached", "KV pages kept for requests with the same prefix.", lambda s: s.blocks_cached),
    ("num_requests_stalled", "Requests that wait for their client to read.", lambda s: s.stalled),
)
COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("num_preemptions", "Times a request was put back into the queue.", lambda s: s.preemptions),
    ("prompt_tokens", "Prompt tokens computed or found in the cache.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.output_tokens),
    ("engine_steps", "Steps of the engine.", lambda s: s.steps),
    ("displaced_requests", "Preemptions that made room for another client.", lambda s: s.displaced),
    ("nan_requests", "Requests ended because their logits were not finite.", lambda s: s.nan_requests),
)


TALLIES: tuple[tuple[str, str, Sequence[int], Callable[[StepStats], list[int]]], ...] = (
    ("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS, lambda s: s.tokens_by_step),
    (
        "request_num_preemptions",
        "Preemptions of an ended choice.",
        PREEMPTIONS,
        lambda s: s.preemptions_by_request,
    ),
)


def families(reports: Sequence[EngineReport], model: str, config: Config) -> Iterator[Metric]:
    """The metrics of all engines.  `model`: value of the label `model_name`."""
    labelled = [(report, [model, str(report.rank)]) for report in reports]
    for name, text, value in GAUGES:
        yield _gauge(name, text, [(labels, value(report.stats)) for report, labels in labelled])
    for name, text, value in COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        for report, labels in labelled:
            counter.add_metric(labels, value(report.stats))
        yield counter
    for name, text, bounds, tally in TALLIES:
        yield _histogram(name, text, bounds, [(labels, tally(report.stats)) for report, labels in labelled])
    epochs = [(labels, float(report.status.epoch)) for report, labels in labelled]
    yield _gauge("weight_epoch", "How often the weights have changed.", epochs)
    yield _waiting(labelled)
    yield _states(labelled)
    yield _cache_config(labelled, config)
    yield _ages(labelled)
    for _, metrics in contributions("metrics"):
        for metric in metrics:
            yield _of_room(metric, labelled)


Labelled = Sequence[tuple[EngineReport, list[str]]]


def _gauge(name: str, text: str, samples: Sequence[tuple[list[str], float]]) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
    for labels, value in samples:
        gauge.add_metric(labels, value)
    return gauge


def _histogram(name: str, text: str, bounds: Sequence[int], samples: Sequence[tuple[list[str], list[int]]]) -> Metric:
    """`samples`: labels, and the counts of the buckets with the sum; [] before the first report."""
    histogram = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
    for labels, values in samples:
        counts = values[:-1] or [0] * (len(bounds) + 1)
        ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        histogram.add_metric(labels, list(zip(ends, accumulate(counts), strict=True)), sum(values[-1:]))
    return histogram


def _waiting(labelled: Labelled) -> Metric:
    text = "Requests waiting; deferred: for a prefix that another computes, a grammar, or their client to read."
    waiting = GaugeMetricFamily(PREFIX + "num_requests_waiting_by_reason", text, labels=[*LABELS, "reason"])
    for report, labels in labelled:
        waiting.add_metric([*labels, "capacity"], report.stats.waiting - report.stats.deferred)
        waiting.add_metric([*labels, "deferred"], report.stats.deferred)
    return waiting


def _states(labelled: Labelled) -> Metric:
    state = GaugeMetricFamily(PREFIX + "engine_state", "1 for the engine's state.", labels=[*LABELS, "state"])
    for report, labels in labelled:
        for name in STATES:
            state.add_metric([*labels, name], float(not report.down and name == report.status.state))
    return state


def _cache_config(labelled: Labelled, config: Config) -> Metric:
    cache = config.cache
    dtype = config.model.dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype
    names = (
        "block_size",
        "num_gpu_blocks",
        "kv_cache_size_tokens",
        "cache_dtype",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
    )
    info = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache, in labels.", labels=[*LABELS, *names])
    for report, labels in labelled:
        if (ready := report.ready) is not None:
            values: tuple[Any, ...] = (
                ready.block_size,
                ready.num_blocks,
                ready.num_blocks * ready.block_size,
                dtype,
                cache.enable_prefix_caching,
                cache.gpu_memory_utilization,
                cache.kv_cache_memory_bytes,
            )
            info.add_metric([*labels, *map(str, values)], 1.0)
    return info


def _ages(labelled: Labelled) -> Metric:
    text = "Tokens of ended choices, by weight updates since they were made."
    ages = CounterMetricFamily(PREFIX + "generation_tokens_by_age", text, labels=[*LABELS, "age"])
    for report, labels in labelled:
        for age, count in zip(AGES, report.stats.tokens_by_age or [0] * len(AGES), strict=True):
            ages.add_metric([*labels, age], count)
    return ages


def _of_room(metric: EngineMetric, labelled: Labelled) -> Metric:
    """The samples of a room's metric."""
    family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    names = [*LABELS, metric.label] if metric.label else LABELS
    samples = family(PREFIX + metric.name, metric.text, labels=names)
    for report, labels in labelled:
        value = metric.value(report.stats.rooms, {} if report.ready is None else report.ready.facts)
        for detail, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
            samples.add_metric(labels if detail is None else [*labels, detail], number)
    return samples
