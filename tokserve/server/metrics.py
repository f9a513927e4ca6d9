"""Prometheus metrics: the engine's counters read at scrape time, and histograms of finished requests.

The only importer of prometheus_client.  Nothing is done per token: a request is observed once, when a choice
ends, from the times the engine measured.  Names are vLLM's under the prefix `tokserve:`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokserve.client.async_llm import AsyncLLM
from tokserve.client.outputs import Completion
from tokserve.params import SamplingParams

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "tokserve:"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
REASONS = ("stop", "length", "abort", "deadline", "error")
CAUSES = ("abort_user", "abort_disconnect", "shutdown", "error")


class Histogram:
    """Counts by bucket; `weight` observes a value several times at once."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Add `weight` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count)."""
        labels = [*(repr(bound) for bound in self.bounds), "+Inf"]
        seen = 0
        made: list[tuple[str, float]] = []
        for label, count in zip(labels, self.counts, strict=True):
            seen += count
            made.append((label, seen))
        return made


class Metrics(Collector):
    """All metrics of one app."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm = llm
        self._model = model
        self._finished: Counter[str] = Counter()
        self._aborts: Counter[str] = Counter()
        self.ttft = Histogram("time_to_first_token_seconds", "Arrival to first token.", SHORT)
        self.inter_token = Histogram(
            "inter_token_latency_seconds", "Mean time between tokens of a choice, counted once per token.", SHORT
        )
        self.latency = Histogram("e2e_request_latency_seconds", "Arrival to last token.", SECONDS)
        self.queue = Histogram("request_queue_time_seconds", "Arrival to first computation.", SECONDS)
        self.prefill = Histogram("request_prefill_time_seconds", "First computation to first token.", SECONDS)
        self.decode = Histogram("request_decode_time_seconds", "First to last token.", SECONDS)
        self.prompt_length = Histogram("request_prompt_tokens", "Prompt tokens of a choice.", TOKENS)
        self.output_length = Histogram("request_generation_tokens", "Generated tokens of a choice.", TOKENS)
        self.params_n = Histogram("request_params_n", "The parameter n.", CHOICES)
        self.params_max_tokens = Histogram("request_params_max_tokens", "The parameter max_tokens.", TOKENS)
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def started(self, params: SamplingParams) -> None:
        """A request was admitted."""
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)

    def finished(self, completion: Completion, prompt_tokens: int, output_tokens: int) -> None:
        """A choice ended; its last delta carries the reason and the times."""
        reason = completion.finish_reason or "error"
        self._finished[reason] += 1
        if reason == "abort":
            self._aborts[completion.stop_detail or "abort_user"] += 1
        self.prompt_length.observe(prompt_tokens)
        self.output_length.observe(output_tokens)
        queued, first, total = completion.times
        self.latency.observe(total)
        if not output_tokens:
            return
        self.ttft.observe(first)
        self.queue.observe(queued)
        self.prefill.observe(max(0.0, first - queued))
        self.decode.observe(max(0.0, total - first))
        if output_tokens > 1:
            self.inter_token.observe(max(0.0, total - first) / (output_tokens - 1), output_tokens - 1)

    def aborted(self, cause: str, count: int) -> None:
        """Choices were given up whose end nobody waited for."""
        self._aborts[cause] += count
        self._finished["abort"] += count

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        s = self._llm.stats
        yield self._gauge("num_requests_running", "Requests being computed.", s.running)
        yield self._gauge("num_requests_waiting", "Requests waiting for a place.", s.waiting)
        used = s.blocks_held / s.blocks_total if s.blocks_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages held by running requests, 0 to 1.", used)
        yield self._gauge("kv_cache_blocks_cached", "KV pages kept for requests with the same prefix.", s.blocks_cached)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_hits),
            ("num_preemptions", "Times a request was put back into the queue.", s.preemptions),
            ("prompt_tokens", "Prompt tokens computed or found in the cache.", s.prompt_tokens),
            ("generation_tokens", "Tokens generated.", s.output_tokens),
            ("engine_steps", "Steps of the engine.", s.steps),
            ("nan_requests", "Requests ended because their logits were not finite.", s.nan_requests),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        yield self._by("request_success", "Choices ended, by reason.", "finished_reason", self._finished, REASONS)
        yield self._by("request_aborts", "Choices aborted, by cause.", "cause", self._aborts, CAUSES)
        for histogram in self._histograms:
            made = HistogramMetricFamily(PREFIX + histogram.name, histogram.text, labels=["model_name"])
            made.add_metric([self._model], histogram.buckets(), histogram.total)
            yield made

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by(self, name: str, text: str, label: str, counts: Counter[str], known: Sequence[str]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for value in dict.fromkeys([*known, *counts]):
            family.add_metric([self._model, value], counts[value])
        return family
