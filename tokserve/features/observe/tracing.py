"""OpenTelemetry: a span per request, with spans for each choice's time in the queue, in prefill and in decode.

The only importer of opentelemetry, and imported only with --otlp-traces-endpoint.  Spans are made when a request ends,
from the times that the engine measured, so tracing costs nothing per token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import tokserve
from tokserve.base.errors import RequestError
from tokserve.client.outputs import ChoiceOutput
from tokserve.protocol.params import SamplingParams
from tokserve.server.generation import Generation
from tokserve.server.observer import Observer

EXPORT_SECONDS = 5  # timeout for sending a batch to the collector
PARAMS = ("n", "max_tokens", "temperature", "top_p")


class Tracing:
    """Makes an observer for each request.  `processor`: where spans go; by default in batches to `endpoint` (a URL)."""

    def __init__(self, model: str, endpoint: str, processor: SpanProcessor | None = None) -> None:
        resource = Resource.create({"service.name": "tokserve", "service.version": tokserve.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if processor is None:
            processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tokserve")
        self._model = model

    def observe(self, headers: Mapping[str, str]) -> Trace:
        """The observer of a new request; its `traceparent` header names the parent span."""
        return Trace(self._tracer, self._model, TraceContextTextMapPropagator().extract(dict(headers)))

    def close(self) -> None:
        """Send the remaining spans; blocks until the collector has them, or does not answer."""
        self._provider.shutdown()


class Trace(Observer):
    """Observes one request and makes its spans."""

    def __init__(self, tracer: Tracer, model: str, parent: Context) -> None:
        self._tracer = tracer
        self._parent = parent
        self._arrival = time.time_ns()
        self._attributes: dict[str, Any] = {"gen_ai.request.model": model}
        self._ends: list[ChoiceOutput] = []
        self._reasons: list[str] = []
        self._error: RequestError | None = None
        self._generation: Generation | None = None

    def accepted(self, generation: Generation, params: SamplingParams | None) -> None:
        self._generation = generation
        self._attributes["gen_ai.request.id"] = generation.key
        for name in PARAMS:
            value = getattr(params, name, None)
            if value is not None:
                self._attributes[f"gen_ai.request.{name}"] = value

    def refused(self, error: RequestError) -> None:
        self._error = error

    def finished(self, completion: ChoiceOutput, prompt_tokens: int, output_tokens: int) -> None:
        """Keep a choice's times."""
        self._ends.append(completion)
        self._reasons.append(completion.finish_reason or "error")

    def aborted(self, cause: str, count: int) -> None:
        """Keep the reasons of aborted choices."""
        self._reasons += [cause] * count

    def closed(self) -> None:
        """Make the spans."""
        span = self._tracer.start_span(
            "llm_request", self._parent, SpanKind.SERVER, self._attributes, start_time=self._arrival
        )
        if self._error is not None:
            span.set_status(Status(StatusCode.ERROR, self._error.code or self._error.type))
            span.set_attribute("http.response.status_code", self._error.status)
        if self._generation is not None:
            usage = self._generation.usage()
            span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
            span.set_attribute("gen_ai.usage.cached_tokens", usage.prompt_tokens_details.cached_tokens)
            span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        inside = set_span_in_context(span, self._parent)
        for end in self._ends:
            self._add_phases(end, inside)
        span.end()

    def _add_phases(self, end: ChoiceOutput, inside: Context) -> None:
        """Make the spans of the phases that a choice has reached."""
        queued, first, total = end.times
        phases = (
            ("queue", 0.0, queued or total),
            ("prefill", queued, (first or total) if queued else 0.0),
            ("decode", first, total if first else 0.0),
        )
        for name, start, stop in phases:
            if stop > start or name == "queue":
                phase = self._tracer.start_span(
                    name, inside, attributes={"gen_ai.choice.index": end.index}, start_time=self._at(start)
                )
                phase.end(self._at(stop))

    def _at(self, seconds: float) -> int:
        return self._arrival + int(seconds * 1e9)
