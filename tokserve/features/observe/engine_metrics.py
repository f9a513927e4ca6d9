"""Prometheus metrics of the engines: a sample per engine, from what each reported last.

The label `engine` is the engine's number, as vLLM's data parallel ranks have it.  Names are vLLM's where vLLM has the
metric.  What the API processes count themselves is in `metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from tokserve.client.outputs import PREEMPTIONS, STEP_TOKENS, EngineReport, StepStats
from tokserve.config import Config
from tokserve.features.observe import store_metrics

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
    ("session_blocks", "Blocks of the KV cache that are kept for open sessions.", lambda s: s.session_blocks),
    ("kv_cache_blocks_cached", "KV pages kept for requests with the same prefix.", lambda s: s.blocks_cached),
    ("recurrent_state_snapshots", "Snapshots of recurrent states that are kept.", lambda s: s.snapshots),
    ("clients", "Clients that have requests.", lambda s: s.clients),
    ("num_requests_stalled", "Requests that wait for their client to read.", lambda s: s.stalled),
    ("grammar_cache_bytes", "Memory of the compiled grammars that are kept, estimated.", lambda s: s.grammar_bytes),
    ("grammars_compiling", "Grammars that requests wait for.", lambda s: s.grammars_compiling),
)
COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("num_preemptions", "Times a request was put back into the queue.", lambda s: s.preemptions),
    ("prompt_tokens", "Prompt tokens computed or found in the cache.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.output_tokens),
    (
        "attention_keys",
        "Keys that requests' attention needed on a CPU, in the layers of one rank.",
        lambda s: s.attention_keys,
    ),
    (
        "shared_attention_keys",
        "Those of the keys that were read for another request of the step anyway.",
        lambda s: s.shared_attention_keys,
    ),
    ("session_cache_hits", "Prompt tokens of sessions found in the cache.", lambda s: s.session_hits),
    ("engine_steps", "Steps of the engine.", lambda s: s.steps),
    ("displaced_requests", "Preemptions that made room for another client.", lambda s: s.displaced),
    ("grammar_refusals", "Grammars refused after a trial.", lambda s: s.grammar_refusals),
    ("nan_requests", "Requests ended because their logits were not finite.", lambda s: s.nan_requests),
    ("spec_decode_num_drafts", "Steps of requests that had drafts.", lambda s: s.draft_steps),
    ("spec_decode_num_draft_tokens", "Drafts.", lambda s: s.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Drafts that were accepted.", lambda s: sum(s.accepted_by_position)),
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
    text = "Memory reserved for recurrent states and snapshots of them."
    reserved = [(labels, _fact(report, "state_bytes")) for report, labels in labelled]
    yield _gauge("recurrent_state_bytes", text, reserved)
    epochs = [(labels, float(report.status.epoch)) for report, labels in labelled]
    yield _gauge("weight_epoch", "How often the weights have changed.", epochs)
    stores = [(labels, report.stats.store, _fact(report, "kv_block_bytes")) for report, labels in labelled]
    yield from store_metrics.families(stores, PREFIX, LABELS)
    yield _waiting(labelled)
    yield _states(labelled)
    yield _cache_config(labelled, config)
    yield from _by_detail(labelled)


Labelled = Sequence[tuple[EngineReport, list[str]]]


def _fact(report: EngineReport, name: str) -> float:
    return 0.0 if report.ready is None else report.ready.facts.get(name, 0)


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


def _by_detail(labelled: Labelled) -> Iterator[Metric]:
    """Counters with a label of their own."""
    text = "Tokens of ended choices, by weight updates since they were made."
    ages = CounterMetricFamily(PREFIX + "generation_tokens_by_age", text, labels=[*LABELS, "age"])
    text = "Drafts that were accepted, by their position."
    name = PREFIX + "spec_decode_num_accepted_tokens_per_pos"
    positions = CounterMetricFamily(name, text, labels=[*LABELS, "position"])
    for report, labels in labelled:
        for age, count in zip(AGES, report.stats.tokens_by_age or [0] * len(AGES), strict=True):
            ages.add_metric([*labels, age], count)
        for position, count in enumerate(report.stats.accepted_by_position):
            positions.add_metric([*labels, str(position)], count)
    yield ages
    yield positions
    for index, name, text in (
        (0, "spec_decode_num_draft_tokens_by_source", "Drafts, by where they came from."),
        (1, "spec_decode_num_accepted_tokens_by_source", "Drafts that were accepted, by where they came from."),
    ):
        sources = CounterMetricFamily(PREFIX + name, text, labels=[*LABELS, "source"])
        for report, labels in labelled:
            for source, counts in report.stats.drafts_by_source.items():
                sources.add_metric([*labels, source], counts[index])
        yield sources
