"""Prometheus metrics: the engines' counters, read at scrape time, and the API processes' counters of requests.

This folder alone imports prometheus_client.  Nothing is counted per token: a choice is observed once, when it ends,
with the times that the engine measured.  Names and labels are vLLM's under the prefix `tokserve:`; those that vLLM has
can be exported under vLLM's prefix as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from time import perf_counter

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokserve.base.errors import REFUSALS, QueueFull, RequestError
from tokserve.client.async_llm import AsyncLLM
from tokserve.client.outputs import ChoiceOutput
from tokserve.config import Config
from tokserve.features.observe import engine_metrics
from tokserve.features.observe.counters import SharedCounters
from tokserve.features.observe.engine_metrics import LABELS, PREFIX
from tokserve.protocol.params import SamplingParams
from tokserve.server.compat import VLLM_METRICS
from tokserve.server.generation import Generation
from tokserve.server.observer import Measure, Observer, Render

CONTENT_TYPE = CONTENT_TYPE_LATEST
VLLM_PREFIX = "vllm:"
ENGINE = "0"  # value of vLLM's label for what the API processes count: sums over all engines
TINY = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SHORT = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
STALLS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHORTEST_STALL = 0.01
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
REASONS = ("stop", "length", "repetition", "abort", "deadline", "error")
CAUSES = ("abort_user", "abort_disconnect", "abort_stalled", "abort_pause", "abort_quarantine", "shutdown", "error")
LIMITS = {  # options of the queue, as vLLM calls them
    "max_queued_requests": "max_num_queued_reqs",
    "max_queued_tokens": "max_num_queued_tokens",
}
SAMPLED = 16  # the serialization of one stream in so many is timed


class Histogram:
    """A histogram in shared memory: counts by bucket, then the sum."""

    def __init__(self, counters: SharedCounters, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self._cells = counters.allocate(len(bounds) + 2)

    def observe(self, value: float, weight: int = 1) -> None:
        self._cells.add(bisect_left(self.bounds, value), weight)
        self._cells.add(len(self.bounds) + 1, value * weight)

    @property
    def total(self) -> float:
        return self._cells.total(len(self.bounds) + 1)

    def buckets(self) -> list[tuple[str, float]]:
        """The buckets: (upper bound, cumulative count)."""
        labels = [*(repr(bound) for bound in self.bounds), "+Inf"]
        cumulative = 0.0
        buckets: list[tuple[str, float]] = []
        for index, label in enumerate(labels):
            cumulative += self._cells.total(index)
            buckets.append((label, cumulative))
        return buckets


class LabelledCounter:
    """A counter for each value of a label; values that are not in `known` count as "other"."""

    def __init__(self, counters: SharedCounters, known: Sequence[str]) -> None:
        self._indices = {value: index for index, value in enumerate((*known, "other"))}
        self._cells = counters.allocate(len(self._indices))

    def add(self, value: str, count: int = 1) -> None:
        self._cells.add(self._indices.get(value, self._indices["other"]), count)

    def totals(self) -> dict[str, float]:
        """Counts by value; "other" only if it is not 0."""
        totals = {value: self._cells.total(index) for value, index in self._indices.items()}
        return {value: count for value, count in totals.items() if count or value != "other"}


class Metrics(Collector, Observer):
    """All metrics of the server; its API processes share `counters`.  Observes all requests."""

    def __init__(self, llm: AsyncLLM, config: Config, model: str, counters: SharedCounters) -> None:
        self._llm = llm
        self._config = config
        self._model = model
        self._vllm = config.logs.vllm_metric_names
        self._inflight = counters.allocate(1)
        self._inflight.clear()
        self._finished = LabelledCounter(counters, REASONS)
        self._aborts = LabelledCounter(counters, CAUSES)
        self._refusals = LabelledCounter(counters, REFUSALS)
        self._rejections = LabelledCounter(counters, list(LIMITS.values()))
        self._truncated_masks = counters.allocate(1)
        self._images = counters.allocate(2)  # looked up, and found
        self._num_streams = 0
        self._measures: Sequence[Measure] = ()  # of rooms, when they were last rendered
        self.ttft = Histogram(counters, "time_to_first_token_seconds", "Arrival to first token.", SHORT)
        text = "Mean time between tokens of a choice, counted once per token."
        self.inter_token = Histogram(counters, "inter_token_latency_seconds", text, SHORT)
        text = "Mean time between tokens of a choice, counted once per choice."
        self.per_token = Histogram(counters, "request_time_per_output_token_seconds", text, SHORT)
        self.latency = Histogram(counters, "e2e_request_latency_seconds", "Arrival to last token.", SECONDS)
        self.queue = Histogram(counters, "request_queue_time_seconds", "Arrival to first computation.", SECONDS)
        text = "First computation to last token."
        self.inference = Histogram(counters, "request_inference_time_seconds", text, SECONDS)
        self.prefill = Histogram(counters, "request_prefill_time_seconds", "First computation to first token.", SECONDS)
        self.decode = Histogram(counters, "request_decode_time_seconds", "First to last token.", SECONDS)
        self.prompt_length = Histogram(counters, "request_prompt_tokens", "Prompt tokens of a choice.", TOKENS)
        self.output_length = Histogram(counters, "request_generation_tokens", "Generated tokens of a choice.", TOKENS)
        self.params_n = Histogram(counters, "request_params_n", "The parameter n.", CHOICES)
        self.params_max_tokens = Histogram(counters, "request_params_max_tokens", "The parameter max_tokens.", TOKENS)
        text = "How late an API process' event loop wakes a sleeper."
        self.loop_lag = Histogram(counters, "event_loop_lag_seconds", text, TINY)
        text = f"Times for which an API process' event loop did nothing else, from {SHORTEST_STALL:g} s."
        self.loop_stall = Histogram(counters, "event_loop_stall_seconds", text, STALLS)
        text = f"Making the events of a delta, in one stream of {SAMPLED}."
        self.serialization = Histogram(counters, "stream_serialization_seconds", text, TINY)
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    @property
    def inflight(self) -> int:
        return int(self._inflight.total(0))

    def started(self) -> None:
        """Count a request in flight, until `closed`."""
        self._inflight.add(0)

    def closed(self) -> None:
        self._inflight.add(0, -1)

    def refused(self, error: RequestError) -> None:
        """Count a refused request; only refusals by the engine (`REFUSALS`) are counted, not invalid requests."""
        if error.code in REFUSALS:
            self._refusals.add(error.code)
        if isinstance(error, QueueFull) and error.limit in LIMITS:
            self._rejections.add(LIMITS[error.limit])

    def accepted(self, generation: Generation, params: SamplingParams | None) -> None:
        """Observe the parameters of an accepted request."""
        if params is not None:
            self.params_n.observe(params.n)
        if params is not None and params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)

    def finished(self, completion: ChoiceOutput, prompt_tokens: int, output_tokens: int) -> None:
        """Observe an ended choice; its last delta has the reason and the times."""
        reason = completion.finish_reason or "error"
        self._finished.add(reason)
        if reason == "abort":
            self._aborts.add(completion.stop_detail or "abort_user")
        self.prompt_length.observe(prompt_tokens)
        self.output_length.observe(output_tokens)
        if truncated := completion.counts.get("sampling_masks"):
            self._truncated_masks.add(0, truncated)
        queued, first, total = completion.times
        self.latency.observe(total)
        if not first:
            return
        decode = max(0.0, total - first)
        self.ttft.observe(first)
        self.queue.observe(queued)
        self.inference.observe(max(0.0, total - queued))
        self.prefill.observe(max(0.0, first - queued))
        self.decode.observe(decode)
        if output_tokens > 1:
            self.inter_token.observe(decode / (output_tokens - 1), output_tokens - 1)
            self.per_token.observe(decode / (output_tokens - 1))

    def aborted(self, cause: str, count: int) -> None:
        self._aborts.add(cause, count)
        self._finished.add("abort", count)

    def timed(self, make: Render) -> Render:
        """`make`, which renders a stream's events; for one stream in `SAMPLED`, wrapped to measure the time."""
        self._num_streams += 1
        if self._num_streams % SAMPLED != 1:
            return make

        def timed(delta: ChoiceOutput) -> bytes:
            start = perf_counter()
            events = make(delta)
            self.serialization.observe(perf_counter() - start)
            return events

        return timed

    def image_lookup(self, hit: bool) -> None:
        """An image was looked up among the processed ones."""
        self._images.add(0)
        self._images.add(1, float(hit))

    def observe_lag(self, late: float) -> None:
        self.loop_lag.observe(late)
        if late >= SHORTEST_STALL:
            self.loop_stall.observe(late)

    def render(self, measures: Sequence[Measure] = ()) -> bytes:
        """The metrics in Prometheus' text format, with those of rooms."""
        self._measures = measures
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            yield family
            if self._vllm and family.name.removeprefix(PREFIX) in VLLM_METRICS:
                yield _renamed(family)

    def _families(self) -> Iterator[Metric]:
        yield from engine_metrics.families(self._llm.reports, self._model, self._config)
        text = "HTTP requests for tokens that are being served."
        inflight = GaugeMetricFamily(PREFIX + "http_requests_in_flight", text, labels=LABELS)
        inflight.add_metric([self._model, ENGINE], self.inflight)
        yield inflight
        masks = "Tokens without a sampling mask, as it would have had too many ids."
        for name, text, value in (
            ("mm_cache_queries", "Images looked up among those that were processed before.", self._images.total(0)),
            ("mm_cache_hits", "Images found there.", self._images.total(1)),
            ("sampling_masks_truncated", masks, self._truncated_masks.total(0)),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            counter.add_metric([self._model, ENGINE], value)
            yield counter
        yield self._labelled("request_success", "Choices ended, by reason.", "finished_reason", self._finished)
        yield self._labelled("request_aborts", "Choices aborted, by cause.", "cause", self._aborts)
        text = "Requests that the engine did not accept, by reason; not invalid ones."
        yield self._labelled("request_refusals", text, "reason", self._refusals)
        text = "Requests not accepted since the queue is full, by limit."
        yield self._labelled("admission_rejections", text, "reason", self._rejections)
        for histogram in self._histograms:
            family = HistogramMetricFamily(PREFIX + histogram.name, histogram.text, labels=LABELS)
            family.add_metric([self._model, ENGINE], histogram.buckets(), histogram.total)
            yield family
        yield from map(self._measured, self._measures)

    def _measured(self, measure: Measure) -> Metric:
        kind = CounterMetricFamily if measure.is_counter else GaugeMetricFamily
        family = kind(PREFIX + measure.name, measure.text, labels=[*LABELS, *filter(None, [measure.label])])
        for value, count in measure.values.items():
            family.add_metric([self._model, ENGINE, *filter(None, [measure.label and value])], count)
        return family

    def _labelled(self, name: str, text: str, label: str, tally: LabelledCounter) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*LABELS, label])
        for value, count in tally.totals().items():
            family.add_metric([self._model, ENGINE, value], count)
        return family


def _renamed(family: Metric) -> Metric:
    """The same metric under vLLM's prefix."""
    other = Metric(VLLM_PREFIX + family.name.removeprefix(PREFIX), family.documentation, family.type)
    other.samples = [sample._replace(name=VLLM_PREFIX + sample.name.removeprefix(PREFIX)) for sample in family.samples]
    return other
